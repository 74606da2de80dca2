"""What Kubernetes writes for Services is no setting, whatever the Services are called."""

from __future__ import annotations

import os
import re

import pytest

from app.cli import main
from app.commands import sagemaker
from app.settings import drop_service_links, load
from app.settings.service_links import is_service_link


def links(service: str, address: str = "10.96.0.7", number: int = 8000) -> dict[str, str]:
    """The variables for a Service with one named port."""
    name = service.upper().replace("-", "_")
    port = f"{name}_PORT_{number}_TCP"
    host = f"[{address}]" if ":" in address else address
    url = f"tcp://{host}:{number}"
    return {
        f"{name}_SERVICE_HOST": address, f"{name}_SERVICE_PORT": str(number),
        f"{name}_SERVICE_PORT_HTTP_API": str(number), f"{name}_PORT": url, port: url,
        f"{port}_PROTO": "tcp", f"{port}_PORT": str(number), f"{port}_ADDR": address,
    }  # fmt: skip


@pytest.mark.parametrize("service", ["vllm", "vllm-cpu", "vllm-dp-master", "aerie", "sm-vllm"])
@pytest.mark.parametrize("address", ["10.96.0.7", "fd00::7"])
def test_services_that_are_called_like_settings(service: str, address: str) -> None:
    written = links(service, address)
    environ = {**written, "PATH": "/bin"}
    assert drop_service_links(environ) == sorted(written)
    assert environ == {"PATH": "/bin"}


def test_services_that_are_called_like_anything_else() -> None:
    """Addresses under another library's port go too, without a word; all else may be in use."""
    environ = links("master") | {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "REDIS_PORT": "6379"}
    assert drop_service_links(environ) == []
    assert "MASTER_PORT" not in environ
    assert environ["MASTER_SERVICE_HOST"] == "10.96.0.7"
    assert environ["KUBERNETES_SERVICE_HOST"] == "10.0.0.1"
    assert environ["REDIS_PORT"] == "6379"


def test_settings_stay() -> None:
    environ = {"VLLM_PORT": "9000", "AERIE_PORT": "8000", "SM_VLLM_PORT": "8080"}
    assert drop_service_links(environ) == []
    assert len(environ) == 3


def test_no_variable_of_vllm_is_taken_for_a_link_or_fails_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    envs = pytest.importorskip("vllm.envs", reason="vllm is not installed")
    names = list(envs.environment_variables)
    assert "VLLM_PORT" in names
    assert not [name for name in names if is_service_link(name, "1")]
    found = [re.sub(r"_PORT$", "", name) for name in names if name.endswith("_PORT")]
    for prefix in found:
        for key, text in links(prefix).items():
            monkeypatch.setenv(key, text)
    drop_service_links(os.environ)
    assert len(found) > 3
    for prefix in found:
        assert isinstance(envs.environment_variables[f"{prefix}_PORT"](), int | None)


def test_every_command_ignores_them_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for service in ("vllm", "aerie", "sm-vllm", "sagemaker-x"):
        for key, text in links(service).items():
            monkeypatch.setenv(key, text)
    assert main(["serve", "--port", "70000"]) == 2
    error = capsys.readouterr().err
    assert "ignored what Kubernetes wrote" in error
    assert "VLLM_PORT" in error
    assert not sagemaker.hosted(os.environ)
    assert load({}, os.environ) == load({}, {})


def test_the_doctor_says_what_is_ignored(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_PORT", "tcp://10.96.0.7:8000")
    assert main(["doctor", "--k", "0", "--port", "0"]) in (0, 1)
    printed = capsys.readouterr().out
    assert "warn  variables" in printed
    assert "ignored VLLM_PORT" in printed
    assert "enableServiceLinks" in printed
    assert "VLLM_PORT" not in os.environ
