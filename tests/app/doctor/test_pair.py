"""Target and head where their files are: what is refused by them, and what is left to vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.doctor.pair import check_models
from app.settings import load

TARGET = Path(__file__).parents[3] / "models" / "embedded" / "target"


def failures(settings: dict[str, Any]) -> list[str]:
    """What a model without drafts fails for."""
    findings, _ = check_models(load({"k": "0", **settings}, {}))
    return [
        f"{finding.check}: {finding.detail}" for finding in findings if finding.status == "FAIL"
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The embedded target without a tokenizer."""
    for file in TARGET.iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).symlink_to(file)
    return tmp_path


OVER = {"max_model_len": "99999"}


@pytest.mark.parametrize(
    ("settings", "environ"),
    [
        ({**OVER, "engine_args": {"hf_overrides": {"max_position_embeddings": 99999}}}, {}),
        (OVER, {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}),
        ({"model": "s3://bucket/model"}, {}),
        ({"model": "s3://bucket/model", "engine_args": {"load_format": "runai_streamer"}}, {}),
    ],
)
def test_what_vllm_may_serve_is_not_refused(
    settings: dict[str, Any], environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert failures({"model": str(TARGET), **settings}) == []


@pytest.mark.parametrize(
    ("arguments", "files"),
    [
        ({"tokenizer": str(TARGET)}, []),
        ({"tokenizer_mode": "custom"}, []),
        ({}, ["tiktoken.model"]),
        ({}, ["vocab.json", "merges.txt"]),
    ],
)
def test_a_tokenizer_of_another_kind_is_not_refused(
    arguments: dict[str, Any], files: list[str], folder: Path
) -> None:
    for name in files:
        (folder / name).touch()
    assert failures({"model": str(folder), "engine_args": arguments}) == []


def test_weights_of_another_format_are_not_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "tokenizer.json").touch()
    assert failures({"model": str(folder), "engine_args": {"load_format": "tensorizer"}}) == []


def test_what_is_plainly_wrong_is_refused(folder: Path) -> None:
    """Also beside an option that decides something else."""
    offload = {"engine_args": {"cpu_offload_gb": 10}}
    assert "over the model's" in failures({"model": str(TARGET), **OVER, **offload})[0]
    assert "no tokenizer" in failures({"model": str(folder), **offload})[0]
    assert "no such folder" in failures({"model": str(folder / "none")})[0]
    tokenizer = {"engine_args": {"tokenizer": str(TARGET)}}
    assert "over the model's" in failures({"model": str(folder), **OVER, **tokenizer})[0]


@pytest.mark.parametrize(
    "name", ["qwen3:8b", "org/model-GGUF:Q4_K_M", "model.gguf", "./model.gguf"]
)
def test_what_other_servers_take_for_a_model_is_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: a traceback of the hub's library."""
    monkeypatch.chdir(tmp_path)
    if ":" not in name:
        (tmp_path / name).touch()
    finding, _ = check_models(load({"model": name, "k": "0"}, {}))[0]
    assert finding.status == "FAIL" and name in finding.detail
    assert finding.remedy is not None and finding.remedy.startswith("--model with a folder")


@pytest.mark.parametrize("name", ["a" * 300, "/" + "a" * 300])
def test_a_name_that_the_system_refuses_is_a_finding(name: str) -> None:
    """The fault: a traceback, as for a folder within one that this user may not read."""
    assert "File name too long" in failures({"model": name})[0]


def test_a_chat_template_that_is_no_text_is_a_finding(tmp_path: Path) -> None:
    """The fault: a traceback."""
    (tmp_path / "template").write_bytes(b"\xff")
    (problem,) = failures({"model": str(TARGET), "chat_template": str(tmp_path / "template")})
    assert problem.endswith("no text in UTF-8")
