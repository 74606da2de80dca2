"""Every option of `vllm serve` works, is refused with a reason, or is known to change nothing."""

from __future__ import annotations

import json
from argparse import Action, BooleanOptionalAction
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.cli import _parser, load_settings, main
from app.commands import vllm_options
from app.commands.vllm_options import AUTO_TOOLS, CANNOT_WORK, NO_EFFECT, SETTINGS, SPECULATION
from app.engine.configuration.options import engine_options
from app.errors import SettingsError
from app.settings import Settings, load, section_of
from docs.from_vllm import PAGE, page

pytest.importorskip("vllm", reason="vllm is not installed")
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from app.engine.configuration import vllm_cli

OPTIONS = vllm_cli.options()
ENGINE = vllm_cli.engine_argument_names()
PARSER = vllm_cli._with_options(FlexibleArgumentParser(exit_on_error=False))
# Values that options may take; the first that vLLM's parser reads is tried.
SAMPLES = ("30", "{}", "/x", '["x"]', "a")
# What cannot be guessed: choices that depend on another option, and values with a form.
GIVEN = {
    "speculative_config": '{"method": "eagle3", "model": "a/head", "num_speculative_tokens": 3}',
    "gpu_memory_utilization": "0.5",
    "tool_call_parser": "hermes",
    "allowed_origins": '["https://a.example"]',
    "runner": "generate",
    "default_chat_template_kwargs": '{"enable_thinking": false}',
    "lora_modules": "a=b",
    "root_path": "/llm",
}
TABLES = {
    "settings": set(SETTINGS) | set(SPECULATION) | {AUTO_TOOLS, "config"},
    "refused": set(CANNOT_WORK),
    "no effect": set(NO_EFFECT),
}


def parsed(option: str) -> dict[str, Any]:
    """The option as vLLM's parser reads it, with a value that it takes."""
    action = OPTIONS[option]
    name = action.option_strings[:1]
    if action.nargs == 0:
        return vars(PARSER.parse_args(name))
    choices = [str(choice) for choice in action.choices or () if choice is not None]
    samples = [GIVEN[option]] if option in GIVEN else choices or SAMPLES
    for sample in samples:
        try:
            return vars(PARSER.parse_args([*name, sample]))
        except (Exception, SystemExit):
            continue
    raise AssertionError(f"no value for {option}")


def test_no_option_of_vllm_is_unknown_or_has_two_fates() -> None:
    known = set.union(*TABLES.values())
    assert set(OPTIONS) - known - ENGINE == set()
    assert known - set(OPTIONS) == set(), "not an option of this vLLM"
    assert sum(map(len, TABLES.values())) == len(known), "an option is in two tables"


@pytest.mark.parametrize("option", sorted(set(OPTIONS) - {"config"}))
def test_an_option_works_or_is_refused_or_changes_nothing(option: str) -> None:
    given = parsed(option)
    assert set(given) == {option}

    def settings(values: dict[str, Any]) -> dict[str, Any]:
        return vllm_options.settings(values, vllm_cli.engine_argument_names, str)

    if option in CANNOT_WORK:
        with pytest.raises(SettingsError, match="cannot work here: ") as caught:
            settings(given)
        assert caught.value.key == option
        assert str(caught.value).endswith(CANNOT_WORK[option])
        return
    if option == AUTO_TOOLS:
        assert settings({**given, "tool_call_parser": "hermes"}) == {"tool_call_parser": "hermes"}
        return
    if option in ("spec_method", "spec_tokens"):
        given["spec_model"] = "a/head"
        given["spec_method"] = "eagle3"
    found = settings(given)
    if option in NO_EFFECT:
        assert found == {}
        return
    tree = load({"model": "a/model", "k": 0, "tool_call_parser": "hermes", **found}, {})
    if option in TABLES["settings"]:
        names = {"drafter", "k"} if option in SPECULATION else {SETTINGS[option]}
        assert set(found) <= names | {"engine_args"}
        assert found
        return
    assert tree.engine.engine_args.keys() == {option}
    AsyncEngineArgs(**{**engine_options(tree), "model": "a/model"})


SHARED = sorted(set(OPTIONS) & set(section_of()))


@pytest.mark.parametrize("name", SHARED)
def test_an_option_of_both_takes_as_many_values(name: str) -> None:
    """Otherwise a second value is taken for MODEL."""
    ours: Action = next(action for action in _parser()[1]["serve"]._actions if action.dest == name)
    theirs = OPTIONS[name]
    assert isinstance(ours, BooleanOptionalAction) == isinstance(theirs, BooleanOptionalAction)
    assert ours.nargs == theirs.nargs


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_model_len", ["1k", "1K", "2.5k", "16"]),
        ("max_num_batched_tokens", ["8k", "8K", "2048"]),
        ("dtype", ["auto", "half", "float16", "float", "bfloat16"]),
        ("allowed_origins", ['["https://a.example", "https://b.example"]']),
        ("served_model_name", ["a"]),
        ("default_chat_template_kwargs", ['{"enable_thinking": false}']),
    ],
)
def test_an_option_of_both_reads_a_value_as_vllm_does(name: str, values: list[str]) -> None:
    for value in values:
        option = OPTIONS[name].option_strings[0]
        theirs = vllm_options.settings(vars(PARSER.parse_args([option, value])), frozenset, str)
        homes = section_of()

        def read(given: Any, home: str = homes[name]) -> Any:
            tree = load({"model": "a/model", "k": 0, name: given}, {})
            return getattr(getattr(tree, home), name)

        assert read(value) == read(theirs[name]), value


@pytest.mark.parametrize("length", ["auto", "-1"])
def test_the_longest_context_that_fits(length: str) -> None:
    tree = load({"model": "a", "k": 0, "max_model_len": length}, {})
    assert engine_options(tree)["max_model_len"] == -1
    assert tree.engine.max_model_len is None


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """What `aerie serve` would serve."""
    taken: list[Settings] = []
    monkeypatch.setattr("app.cli._refuse_unfit_models", lambda *_: None)
    monkeypatch.setattr("app.server.run.serve", taken.append)
    return taken


def test_several_served_names(served: list[Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["serve", "--served-model-name", "small", "gpt-4o-mini"]) == 0
    monkeypatch.setenv("AERIE_SERVED_MODEL_NAME", '["small", "gpt-4o-mini"]')
    assert main(["serve"]) == 0
    monkeypatch.setenv("AERIE_SERVED_MODEL_NAME", "small")
    assert main(["serve"]) == 0
    assert [each.model_names for each in served] == [("small", "gpt-4o-mini")] * 2 + [("small",)]
    assert engine_options(served[0])["served_model_name"] == ["small", "gpt-4o-mini"]
    assert served[0].served_model_name == "small"


def test_a_model_behind_the_names_is_not_a_name(
    served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--served-model-name", "it", "some/model", "--k", "0"]) == 2
    assert "takes some/model for a further name" in capsys.readouterr().err
    assert not served


def test_a_toml_file_may_have_several_names(tmp_path: Path) -> None:
    file = tmp_path / "aerie.toml"
    file.write_text('[model]\nserved_model_name = ["a", "b"]\n')
    assert load({}, {}, config_file=str(file)).model_names == ("a", "b")


def yaml_file(folder: Path, text: str, name: str = "config.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


# Options of every kind.
TAKEN: dict[str, Any] = {
    "model": "some/model", "served-model-name": ["a", "b"], "host": "0.0.0.0",
    "max-model-len": "16k", "tensor_parallel_size": 2, "gpu-memory-utilization": 0.8,
    "dtype": "half", "enforce-eager": True, "enable-prefix-caching": False,
    "enable-auto-tool-choice": True, "tool-call-parser": "hermes", "root-path": "/llm",
    "kv-cache-dtype": "fp8",
    "speculative-config": {"method": "eagle3", "model": "a/head", "num_speculative_tokens": 4},
}  # fmt: skip


def command_line(options: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in options.items():
        words.append(f"--no-{name}" if value is False else f"--{name}")
        if isinstance(value, list):
            words += value
        elif not isinstance(value, bool):
            words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return words


@pytest.mark.parametrize("source", ["command line", "YAML file"])
def test_what_vllm_serve_is_given_is_taken(
    served: list[Settings], tmp_path: Path, source: str
) -> None:
    """What stands beside a YAML file on the command line overrides it."""
    if source == "YAML file":
        text = yaml.safe_dump({**TAKEN, "port": 8001, "compilation-config": {"mode": 0}})
        line = ["--config", yaml_file(tmp_path, text), "--port", "9000"]
    else:
        line = command_line({**TAKEN, "port": 9000, "compilation-config.mode": 0})
    assert main(["serve", *line]) == 0
    (settings,) = served
    assert (settings.model.model, settings.model.dtype) == ("some/model", "float16")
    assert settings.model_names == ("a", "b")
    assert (settings.server.port, settings.server.host) == (9000, "0.0.0.0")
    assert settings.server.root_path == "/llm"
    assert settings.engine.max_model_len == 16_000
    assert settings.engine.tensor_parallel_size == 2
    assert settings.engine.gpu_memory_utilization == 0.8
    assert settings.engine.enforce_eager
    assert settings.engine.enable_prefix_caching is False
    assert settings.engine.engine_args["kv_cache_dtype"] == "fp8"
    assert settings.engine.engine_args["compilation_config"].mode == 0
    assert (settings.speculation.drafter, settings.speculation.k) == ("a/head", 4)


def test_a_yaml_file_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AERIE_CONFIG", yaml_file(tmp_path, "port: 8001\nseed: 3\n", "c.yml"))
    monkeypatch.setenv("AERIE_PORT", "8002")
    settings = load_settings({})
    assert (settings.server.port, settings.engine.seed) == (8002, 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("drafter: a\n", "drafter: is no option of vLLM: give it on the command line or in a TOML"),
        ("nonsense: 1\n", "--nonsense: no such option"),
        ("ssl-keyfile: a\n", "--ssl-keyfile: cannot work here: the gateway speaks plain HTTP"),
        ("port: high\n", "--port: invalid int value"),
        ("a: [b\n", "--config: vLLM cannot read it"),
        ("- a\n", "--config: the file holds no options"),
        ("", "--config: the file is empty: it must hold vLLM's options"),
        ("# port: 8000\n", "--config: the file is empty"),
        ("8000: port\n", "--config: the file holds 8000, which is no option's name"),
        ("enable-auto-tool-choice: true\nk: 0\n", "k: is no option of vLLM"),
        (None, "--config: vLLM cannot read it: [Errno 2]"),
    ],
)
def test_a_yaml_file_that_cannot_be(text: str | None, words: str, tmp_path: Path) -> None:
    file = str(tmp_path / "none.yaml") if text is None else yaml_file(tmp_path, text)
    with pytest.raises(SettingsError) as caught:
        load_settings({"config": file})
    assert str(caught.value).startswith(file)
    assert words in str(caught.value)


def test_the_page_says_what_becomes_of_each_option() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: python -m docs.from_vllm"
    for option in set(OPTIONS) - ENGINE - {"model_tag", "config"}:
        assert f"`--{option.replace('_', '-')}" in page(), option


def test_the_key_of_vllms_environment_guards_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint that was guarded by it must not be open here."""
    assert not load_settings({}).admission.guarded
    monkeypatch.setenv("VLLM_API_KEY", "sk-theirs")
    theirs = load_settings({}).admission
    assert theirs.guarded
    assert load_settings({"api_key": "sk-ours"}).admission.keys != theirs.keys
    monkeypatch.setenv("VLLM_API_KEY", "")
    assert not load_settings({}).admission.guarded
