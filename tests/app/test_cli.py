"""The command line: options follow the settings tree, failures have exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli import _parser, main
from app.settings import section_of


def test_every_setting_is_an_option() -> None:
    options = vars(_parser().parse_args(["serve"]))
    assert set(section_of()) <= set(options)
    assert all(options[name] is None for name in section_of())


def test_a_wrong_setting_exits_2_and_names_the_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--port", "70000"]) == 2
    assert "server.port" in capsys.readouterr().err


def test_the_model_needs_no_option(capsys: pytest.CaptureFixture[str]) -> None:
    options = vars(_parser().parse_args(["serve", "some/model", "--port", "1"]))
    assert (options["positional_model"], options["model"]) == ("some/model", None)
    assert main(["serve", "/no/such/folder", "--k", "0"]) == 1
    assert "/no/such/folder" in capsys.readouterr().err
    assert main(["serve", "a", "--model", "b"]) == 2
    assert "model: given twice: a and b" in capsys.readouterr().err


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("aerie ")


def test_an_abbreviated_option_is_refused() -> None:
    """--mod must not silently mean --model."""
    with pytest.raises(SystemExit):
        main(["serve", "--mod", "x"])


def test_boolean_settings_can_be_switched_off() -> None:
    options = vars(_parser().parse_args(["serve", "--no-enable-prefix-caching"]))
    assert options["enable_prefix_caching"] is False


def test_models_that_cannot_work_are_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", str(tmp_path / "none"), "--k", "0"]) == 1
    assert "no such folder" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert main(["serve", "--model", str(tmp_path), "--k", "0"]) == 1
    assert "safetensors" in capsys.readouterr().err
