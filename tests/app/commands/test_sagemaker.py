"""SageMaker's environment: read as AWS's container reads it, honoured or refused by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from app.cli import main
from app.commands import sagemaker
from app.errors import SettingsError
from app.settings import load

HEAD = {
    "method": "eagle3",
    "model": "amazon/GPT-OSS-20B-P-EAGLE",
    "num_speculative_tokens": 5,
    "parallel_drafting": True,
}
NOWHERE = Path("/no/such/folder")


def variables(**values: str) -> dict[str, str]:
    return {f"SM_VLLM_{name}": value for name, value in values.items()}


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        (variables(MAX_MODEL_LEN="4096"), ["--max-model-len", "4096"]),
        (variables(ENFORCE_EAGER="true"), ["--enforce-eager"]),
        (variables(ENFORCE_EAGER="True"), ["--enforce-eager"]),
        (variables(ENFORCE_EAGER=""), ["--enforce-eager"]),
        (variables(ENFORCE_EAGER="false"), []),
        (variables(SERVED_MODEL_NAME='["a", "b"]'), ["--served-model-name", "a", "b"]),
        (variables(LORA_MODULES='[{"name": "x"}]'), ["--lora-modules", '{"name": "x"}']),
        (variables(CHAT_TEMPLATE="[not json"), ["--chat-template", "[not json"]),
        (
            variables(SPECULATIVE_CONFIG=json.dumps(HEAD)),
            ["--speculative-config", json.dumps(HEAD)],
        ),
        (
            {**variables(SEED="1", DTYPE="half"), "PATH": "/bin", "AERIE_K": "3"},
            ["--dtype", "half", "--seed", "1"],
        ),
    ],
)
def test_variables_become_a_command_line(environ: dict[str, str], line: list[str]) -> None:
    assert sagemaker.tokens(environ) == line


def parsed(environ: dict[str, str], folder: Path = NOWHERE) -> dict[str, Any]:
    """With vLLM's own parser."""
    pytest.importorskip("vllm", reason="vllm is not installed")
    from app.engine.configuration.vllm_cli import engine_argument_names, parse

    return sagemaker.settings(environ, parse, engine_argument_names, folder)


def test_an_endpoint_of_aws_keeps_its_environment() -> None:
    environ = variables(
        MODEL="openai/gpt-oss-20b", SPECULATIVE_CONFIG=json.dumps(HEAD), MAX_MODEL_LEN="32k",
        KV_CACHE_DTYPE="fp8", GPU_MEMORY_UTILIZATION="0.9", ENABLE_PREFIX_CACHING="false",
        NO_ENABLE_PREFIX_CACHING="true", ENABLE_AUTO_TOOL_CHOICE="true",
        TOOL_CALL_PARSER="openai", REASONING_PARSER="openai_gptoss", DTYPE="half",
        LIMIT_MM_PER_PROMPT='{"image": 2}', SERVED_MODEL_NAME='["oss", "gpt-4o"]',
        TENSOR_PARALLEL_SIZE="2",
        UVICORN_LOG_LEVEL="warning", STREAM_INTERVAL="4",
    )  # fmt: skip
    settings = load({}, {}, container=parsed(environ))
    assert settings.model.model == "openai/gpt-oss-20b"
    assert settings.speculation.drafter == HEAD["model"]
    assert settings.speculation.k == 5
    assert settings.engine.max_model_len == 32_000
    assert settings.engine.gpu_memory_utilization == 0.9
    assert settings.engine.tensor_parallel_size == 2
    assert settings.engine.enable_prefix_caching is False
    assert settings.engine.engine_args["kv_cache_dtype"] == "fp8"
    assert settings.engine.engine_args["stream_interval"] == 4
    assert settings.engine.engine_args["limit_mm_per_prompt"] == {"image": 2}
    assert (settings.model.tool_call_parser, settings.model.dtype) == ("openai", "float16")
    assert settings.model_names == ("oss", "gpt-4o")
    assert settings.server.log_level == "warning"
    assert (settings.server.host, settings.server.port) == ("0.0.0.0", 8080)
    assert settings.server.drain_timeout_s < 30


@pytest.mark.parametrize("parallel", [{}, {"parallel_drafting": False}])
def test_the_head_itself_says_whether_it_drafts_in_parallel(parallel: dict[str, bool]) -> None:
    """As EAGLE-3 is asked for in AWS's container; the kind is read from the head."""
    config = {"method": "eagle3", "model": "some/eagle3", "num_speculative_tokens": 3, **parallel}
    found = parsed(variables(SPECULATIVE_CONFIG=json.dumps(config)))
    assert (found["drafter"], found["k"]) == ("some/eagle3", 3)


@pytest.mark.parametrize(
    ("environ", "key", "words"),
    [
        (variables(NO_SUCH_OPTION="1"), "SM_VLLM_NO_SUCH_OPTION", "no such option"),
        (variables(MAX_MODEL_LEN="long"), "SM_VLLM_MAX_MODEL_LEN", "long"),
        (variables(DTYPE="int4"), "SM_VLLM_DTYPE", "int4"),
        (variables(SEED=""), "SM_VLLM_SEED", "expected one argument"),
        (variables(API_KEY='["a", "b"]'), "SM_VLLM_API_KEY", "takes one key"),
        (variables(RESPONSE_ROLE="x"), "SM_VLLM_RESPONSE_ROLE", "the role `assistant`"),
        (variables(SSL_KEYFILE="/x"), "SM_VLLM_SSL_KEYFILE", "plain HTTP"),
        (variables(ENABLE_AUTO_TOOL_CHOICE="true"), "SM_VLLM_ENABLE_AUTO_TOOL_CHOICE", "needs"),
        (
            variables(SPECULATIVE_CONFIG='{"method": "ngram", "num_speculative_tokens": 3}'),
            "SM_VLLM_SPECULATIVE_CONFIG",
            "P-EAGLE",
        ),
        (
            variables(SPECULATIVE_CONFIG=json.dumps({**HEAD, "draft_tensor_parallel_size": 1})),
            "SM_VLLM_SPECULATIVE_CONFIG",
            "draft_tensor_parallel_size",
        ),
        (variables(SPECULATIVE_CONFIG='{"method": "eagle3"'), "SM_VLLM_SPECULATIVE_CONFIG", ""),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    environ: dict[str, str], key: str, words: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        parsed(environ)
    assert caught.value.key == key
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)


def no_options(line: Sequence[str]) -> dict[str, Any]:
    assert not line
    return {}


def read(environ: dict[str, str], folder: Path) -> dict[str, Any]:
    return sagemaker.settings(environ, no_options, frozenset, folder)


def test_artefacts_are_the_model(tmp_path: Path) -> None:
    """SM_VLLM_MODEL, else a folder that is not empty, else HF_MODEL_ID."""
    hub = {"HF_MODEL_ID": "org/model"}
    assert read(hub, tmp_path)["model"] == "org/model"
    (tmp_path / "config.json").write_text("{}")
    found = read(hub, tmp_path)
    assert found["model"] == str(tmp_path)
    assert sagemaker.hosted({}, tmp_path)


def test_artefacts_may_be_a_pair(tmp_path: Path) -> None:
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    found = read({}, tmp_path)
    assert found["model"] == str(tmp_path / "target")
    assert found["drafter"] == str(tmp_path / "drafter")
    settings = load({}, {}, container=found)
    assert settings.speculates


HEAD_ALONE = {"method": "eagle3", "model": "org/head"}


@pytest.mark.parametrize(
    ("environ", "file", "line"),
    [
        (variables(SPECULATIVE_CONFIG=json.dumps(HEAD_ALONE)), "", {}),
        ({"AERIE_DRAFTER": "org/head"}, "", {}),
        ({}, '[speculation]\ndrafter = "org/head"\n', {}),
        ({}, "[speculation]\nk = 3\n", {}),
        ({}, 'preset = "qwen3-8b"\n', {}),
        ({}, "", {"drafter": "org/head"}),
        ({}, "", {"k": 3}),
    ],
)
def test_drafts_are_asked_for_wherever_a_head_or_k_is_named(
    environ: dict[str, str], file: str, line: dict[str, Any], tmp_path: Path
) -> None:
    """The fault: a head in a file, on the command line or without its number of tokens was never
    read, since the platform's layer said that nothing is drafted."""
    settings = tmp_path / "settings.toml"
    settings.write_text(file)
    environ = {"HF_MODEL_ID": "org/model", "AERIE_CONFIG": str(settings), **environ}
    container = parsed(environ)
    ours = {key: value for key, value in environ.items() if key.startswith("AERIE_")}
    assert load(line, ours, container=container).speculates
    del environ["AERIE_CONFIG"]
    plain = parsed({"HF_MODEL_ID": "org/model"})
    assert not load({}, {}, container=plain).speculates


def test_nothing_is_read_elsewhere(tmp_path: Path) -> None:
    assert not sagemaker.hosted({"HF_MODEL_ID": "org/model", "SM_VLLM_MODEL": ""}, NOWHERE)
    assert not sagemaker.hosted({}, tmp_path)
    assert sagemaker.hosted(variables(MODEL="x"), NOWHERE)
    assert sagemaker.hosted({"SAGEMAKER_REGION": "us-east-1"}, NOWHERE)


def test_our_own_variables_and_options_come_first() -> None:
    container = read({"HF_MODEL_ID": "org/model"}, NOWHERE)
    settings = load({"port": "1"}, {"AERIE_HOST": "::1"}, container=container)
    assert (settings.server.port, settings.server.host) == (1, "::1")
    assert not settings.speculates
    mine = {"HF_MODEL_ID": "org/model", "AERIE_DRAFTER": "org/head"}
    own = {key: value for key, value in mine.items() if key.startswith("AERIE_")}
    assert load({}, own, container=read(mine, NOWHERE)).speculation.k == 5


def test_the_command_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm", reason="vllm is not installed")
    monkeypatch.setenv("SM_VLLM_MAX_MODEL_LENGTH", "1")
    assert main(["serve"]) == 2
    assert "SM_VLLM_MAX_MODEL_LENGTH" in capsys.readouterr().err
