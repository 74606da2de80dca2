"""The command line: options follow the settings tree, failures have exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.cli import _parser, main
from app.commands.command_line import FIRST, split
from app.settings import load, section_of


def test_every_setting_is_an_option() -> None:
    options = vars(_parser()[0].parse_args(["serve"]))
    assert set(section_of()) <= set(options)
    assert all(options[name] is None for name in section_of())


def test_a_wrong_setting_exits_2_and_names_the_key(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--port", "70000"]) == 2
    assert "server.port" in capsys.readouterr().err


def test_the_model_needs_no_option(capsys: pytest.CaptureFixture[str]) -> None:
    options = vars(_parser()[0].parse_args(["serve", "some/model", "--port", "1"]))
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


def test_an_abbreviated_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """--mod must not silently mean --model, and what stands behind it may be a secret."""
    assert main(["serve", "--mod", "secret"]) == 2
    error = capsys.readouterr().err
    assert "--mod: no such option" in error
    assert "secret" not in error


@pytest.mark.parametrize(
    ("line", "ours", "theirs"),
    [
        (["m", "--port", "1"], ["m", "--port", "1"], []),
        (["--max_model_len=9", "m"], ["--max-model-len=9", "m"], []),
        (["-tp", "2", "--k", "3"], ["--k", "3"], ["-tp", "2"]),
        (["m", "--enforce-eager", "--max-loras", "4"], ["m", "--enforce-eager"],
         ["--max-loras", "4"]),
        (["--seed", "-1", "--generation-config", "vllm"], ["--seed", "-1"],
         ["--generation-config", "vllm"]),
    ],
)  # fmt: skip
def test_options_that_are_not_ours_are_vllms(
    line: list[str], ours: list[str], theirs: list[str]
) -> None:
    assert split(line, _parser()[1]["serve"]) == (ours, theirs)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'],
         "--speculative-config: {\"method\": \"ngram\""),
        (["--lora-modules", "a=b"], "--lora-modules: cannot work here: adapters"),
        (["--kv-cache-dtype", "fp9"], "--kv-cache-dtype: invalid choice"),
        (["--api-key", "secret", "b"], "admission.api_key: Value error, takes one key"),
        (["--sse-keep-alive-interval", "0"], "--sse-keep-alive-interval: 0 cannot work here"),
        (["--model_tag", "a"], "no such option"),
        (["--k", "0", "--enable-auto-tool-choice"],
         "--enable-auto-tool-choice: needs --tool-call-parser, which is openai for gpt-oss"),
        (["--block-size", "16", "--engine-args", "{}"], "engine_args: give vLLM's options either"),
        (["--drafter", "a", "-sc", '{"method": "peagle", "model": "b"}'],
         "drafter: given twice: a and b"),
    ],
)  # fmt: skip
def test_what_of_vllms_cannot_work_is_refused_with_a_word(
    line: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "some/model", *line]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "doctor"])
def test_help_says_choices_bounds_and_variables(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    for name in section_of():
        assert text.count(f"AERIE_{name.upper()}]") == 1, name
    assert "--dtype {auto,bfloat16,float16,float32}" in text
    assert "At least 0, at most 65535; default 8000; AERIE_PORT]" in text
    assert text.index("most needed") < text.index("--config")
    first = text[text.index("most needed") : text.index("Settings of the HTTP server")]
    assert first.count("\n  --") == 2 + len(FIRST)


def test_engine_arguments_of_several_sources_join() -> None:
    environ = {"AERIE_ENGINE_ARGS": '{"block_size": 16, "kv_cache_dtype": "fp8"}'}
    settings = load({"engine_args": {"block_size": 32}}, environ, preset="embedded")
    assert settings.engine.engine_args["block_size"] == 32
    assert settings.engine.engine_args["kv_cache_dtype"] == "fp8"
    assert settings.engine.engine_args["structured_outputs_config"]


def test_boolean_settings_can_be_switched_off() -> None:
    options = vars(_parser()[0].parse_args(["serve", "--no-enable-prefix-caching"]))
    assert options["enable_prefix_caching"] is False


def test_models_that_cannot_work_are_refused_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", str(tmp_path / "none"), "--k", "0"]) == 1
    assert "no such folder" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert main(["serve", "--model", str(tmp_path), "--k", "0"]) == 1
    assert "safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--verison", "--model", "-k"])
def test_an_option_in_front_of_the_command(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The fault: all that was said is that a command is required."""
    with pytest.raises(SystemExit):
        main([option])
    assert f"{option}: options come behind a command" in capsys.readouterr().err


def test_a_file_of_settings_that_cannot_be_read_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "none.toml"
    assert main(["serve", "--config", str(file)]) == 2
    assert capsys.readouterr().err == f"aerie: config: {file}: No such file or directory\n"
