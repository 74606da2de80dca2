"""What an engine is started with, and what stops the start before there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from app.engine import launch as launch_module
from app.engine.configuration.cpu import CpuMachine
from app.engine.configuration.engine_start import engine_start
from app.engine.configuration.head import head_method
from app.engine.configuration.options import REQUEST_BOUNDS
from app.engine.configuration.runner import V2, Blame, StartPath, start_plan
from app.engine.start_failure import StartFailureError
from app.errors import SettingsError, StartupError
from app.llm.engine_load import EngineLoad
from app.settings import load

pytestmark = pytest.mark.usefixtures("launch_undone")

EMBEDDED = Path(__file__).parents[3] / "models" / "embedded"
CPU = CpuMachine(free_memory=8 << 30, can_compile=True, threads=1)


@pytest.mark.parametrize(("machine", "value"), [(None, "0"), (CPU, None)], ids=["gpu", "cpu"])
def test_on_a_gpu_no_kernel_of_the_sampler_is_compiled_by_nvcc(
    machine: CpuMachine | None, value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: vLLM's default, which fails on every start path where there is only a driver."""
    name = "VLLM_USE_FLASHINFER_SAMPLER"
    monkeypatch.delenv(name, raising=False)
    settings = load({}, {}, preset="embedded")
    _, environ = engine_start(settings, machine, "p-eagle", StartPath.V1)
    assert environ.get(name) == value
    monkeypatch.setenv(name, "1")
    _, environ = engine_start(settings, machine, "p-eagle", StartPath.V1)
    assert environ[name] == "1", "the operator's"


@pytest.mark.parametrize(("hang_timeout_s", "limit"), [(120, "300"), (899.5, "960")])
def test_vllms_own_limit_of_a_step_leaves_hangs_to_the_gateway(
    monkeypatch: pytest.MonkeyPatch, hang_timeout_s: float, limit: str
) -> None:
    """The fault: with several workers no step could last for longer than 300 s, whatever
    `--hang-timeout-s` said."""
    name = "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
    monkeypatch.delenv(name, raising=False)
    settings = load({"hang_timeout_s": hang_timeout_s}, {}, preset="embedded")
    assert engine_start(settings, CPU, "p-eagle", StartPath.V1)[1][name] == limit
    monkeypatch.setenv(name, "77")
    assert engine_start(settings, CPU, "p-eagle", StartPath.V1)[1][name] == "77", "the operator's"


@pytest.mark.parametrize(("usable", "backend"), [(True, None), (False, "triton")])
def test_without_flashinfer_gated_delta_nets_run_on_triton(
    usable: bool, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.utils.flashinfer.has_flashinfer", lambda: usable)
    settings = load({}, {}, preset="embedded")
    options, _ = engine_start(settings, None, "p-eagle", StartPath.V1)
    assert options.get("gdn_prefill_backend") == backend
    mine = {"engine_args": '{"gdn_prefill_backend": "flashinfer"}'}
    options, _ = engine_start(load(mine, {}, preset="embedded"), None, "p-eagle", StartPath.V1)
    assert options["gdn_prefill_backend"] == "flashinfer"


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_a_head_says_itself_how_it_drafts(kind: str) -> None:
    assert head_method(load({"drafter": str(EMBEDDED / kind)}, {})) == kind


def test_a_head_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    settings = load({"drafter": str(tmp_path)}, {})
    with pytest.raises(StartupError, match=r"config\.json"):
        head_method(settings)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(StartupError, match=r"config\.json"):
        head_method(settings)


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_custom_logits_processors_are_refused_beside_drafts(kind: str) -> None:
    """Nothing would apply them to drafted tokens: silence would be another distribution."""
    given = {
        "model": str(EMBEDDED / "target"), "drafter": str(EMBEDDED / kind),
        "engine_args": '{"logits_processors": ["a.module:Processor"], "max_model_len": 64}',
    }  # fmt: skip
    with pytest.raises(StartupError, match=r"logits_processors: a\.module:Processor.*--k 0"):
        launch_module.launch(load(given, {}), EngineLoad(), StartPath.V1)


def test_installed_ones_too_and_none_of_them_without_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def configuration(speculation: Any) -> Any:
        model = SimpleNamespace(logits_processors=None)
        return SimpleNamespace(speculative_config=speculation, model_config=model)

    with_head = SimpleNamespace(method="eagle3", model="org/head")
    launch_module._refuse_logits_processors(configuration(with_head))
    monkeypatch.setattr(
        launch_module, "entry_points", lambda group: [SimpleNamespace(value="their:One")]
    )
    with pytest.raises(StartupError, match=r"their:One \(installed\)"):
        launch_module._refuse_logits_processors(configuration(with_head))
    launch_module._refuse_logits_processors(configuration(None))


@pytest.mark.parametrize("key", ["tool_call_parser", "reasoning_parser"])
def test_a_mistyped_parser_is_named_before_anything_is_loaded(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: vLLM's sentence about another option, after minutes of loading."""
    monkeypatch.setattr(
        "app.llm.async_llm.GatewayLLM.from_vllm_config", lambda *_, **__: pytest.fail("it starts")
    )
    given = {"k": "0", "max_model_len": "64", key: "hermse"}
    with pytest.raises(SettingsError, match=rf"{key}: vLLM has no hermse; it has .*qwen3"):
        launch_module.launch(load(given, {}, preset="embedded"), EngineLoad(), StartPath.V1)


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_what_nothing_drafts_with_is_refused_before_anything_is_loaded(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: minutes of loading, then an engine process that ends without a reason."""
    monkeypatch.setattr("vllm.config.ModelConfig.is_moe", True)
    given = {
        "model": str(EMBEDDED / "target"), "drafter": str(EMBEDDED / kind),
        "engine_args": '{"data_parallel_size": 2, "max_model_len": 64}',
    }  # fmt: skip
    with pytest.raises(StartupError, match=r"data parallelism of a mixture of experts.*--k 0"):
        launch_module.launch(load(given, {}), EngineLoad(), StartPath.V1)


MOE = '{"data_parallel_size": 2, "max_model_len": 64}'
PROCESSORS = '{"logits_processors": ["a.module:Processor"], "max_model_len": 64}'


@pytest.mark.parametrize(
    ("kind", "given", "reason"),
    [
        ("is_moe", {"engine_args": MOE}, "data parallelism of a mixture of experts"),
        ("is_moe", {"engine_args": PROCESSORS}, "not applied to drafted tokens"),
        ("is_hybrid", {"max_model_len": "64"}, "give --lookup-k"),
    ],
    ids=["ranks that meet", "logits processors", "recurrent layers"],
)
def test_lookups_that_cannot_or_should_not_run_lead_to_no_drafts(
    kind: str, given: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The faults: a start that ended, though nobody had asked for drafts; and a few requests at
    once in a target whose requests hold states, without a word."""
    monkeypatch.setattr(
        "app.llm.async_llm.GatewayLLM.from_vllm_config", lambda *_, **__: pytest.fail("it starts")
    )
    monkeypatch.setattr(f"vllm.config.ModelConfig.{kind}", True)
    settings = load({"model": str(EMBEDDED / "target"), **given}, {})
    with pytest.raises(StartFailureError, match=reason) as told:
        launch_module.launch(settings, EngineLoad(), StartPath.V1)
    assert told.value.blame is Blame.UNSUPPORTED
    plan = start_plan(settings, on_cpu=False, wish=None)
    assert plan.after(StartPath.V1, told.value.blame) is StartPath.NO_DRAFTS


def test_lookups_in_recurrent_layers_run_where_they_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm.config.ModelConfig.is_hybrid", True)
    started = RuntimeError("it starts")

    def start(*_: Any, **__: Any) -> None:
        raise started

    monkeypatch.setattr("app.llm.async_llm.GatewayLLM.from_vllm_config", start)
    given = {"model": str(EMBEDDED / "target"), "max_model_len": "64", "lookup_k": "3"}
    with caplog.at_level("INFO"), pytest.raises(RuntimeError, match="it starts"):
        launch_module.launch(load(given, {}), EngineLoad(), StartPath.V1)
    assert "3 more states of every recurrent layer" in caplog.text


def test_what_v2_cannot_run_is_told_before_anything_is_loaded() -> None:
    """And is no failure of the start: V1 may run it."""
    pytest.importorskip("triton")
    given = {
        "model": str(EMBEDDED / "target"), "drafter": str(EMBEDDED / "p-eagle"),
        "draft_context": "64", "max_model_len": "64",
    }  # fmt: skip
    with pytest.raises(StartFailureError) as told:
        launch_module.launch(load(given, {}), EngineLoad(), StartPath.V2)
    assert (told.value.blame, told.value.reason) == (Blame.UNSUPPORTED, "unsupported")
    assert os.environ[V2] == "1"


def test_a_model_that_is_missing_is_no_matter_of_the_runner(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    given = {"model": str(tmp_path / "none"), "drafter": str(EMBEDDED / "p-eagle")}
    with pytest.raises(Exception) as told:  # noqa: PT011 - vLLM's own, whichever it is
        launch_module.launch(load(given, {}), EngineLoad(), StartPath.V2)
    assert not isinstance(told.value, StartFailureError)


@pytest.mark.parametrize(
    ("path", "wish", "variable"),
    [
        (StartPath.V1, None, "0"),
        (StartPath.V1_EAGER, True, "0"),
        (StartPath.NO_DRAFTS, None, None),
        (StartPath.NO_DRAFTS, False, "0"),
    ],
)
def test_each_path_has_its_runner_whatever_the_path_before_had(
    path: StartPath, wish: bool | None, variable: str | None
) -> None:
    os.environ[V2] = "1"
    settings = load({}, {}, preset="embedded")
    _, environ = engine_start(settings, CPU, "p-eagle", path, wish)
    assert environ.get(V2) == variable


# In a fork for each command line: what takes seconds to import comes before, and knows no bounds.
READS_BOUNDS = """
import os, sys
import vllm.engine.arg_utils
assert not [name for name in sys.modules if "vllm.entrypoints" in name and "protocol" in name]
for options in ([], ["--kv-cache-dtype", "auto"]):
    if not (child := os.fork()):
        break
    assert os.waitpid(child, 0)[1] == 0, options
else:
    sys.exit()
from app.engine.configuration.vllm_cli import parse
from app.engine.launch import prepare
from app.settings.limits import LimitSettings
if options:
    parse(options)
prepare()
from vllm import envs
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
stops = ["a"] * 1000
message = {"role": "user", "content": "hi"}
given = {"model": "m", "messages": [message], "max_tokens": 1}
ChatCompletionRequest(**given, stop=stops)
AnthropicMessagesRequest(**given, stop_sequences=stops)
(most,) = [each.le for each in LimitSettings.model_fields["max_bad_words"].metadata
           if hasattr(each, "le")]
assert 2 * most <= envs.VLLM_MAX_NUM_BAD_WORDS
print(envs.VLLM_MAX_STOP_STRINGS)
"""


def test_as_many_stop_strings_and_bad_words_are_taken_as_the_settings_say() -> None:
    """vLLM's request models take 4 stop strings, and are built when they are imported, which its
    parser of options does too."""
    environ = {name: value for name, value in os.environ.items() if name not in REQUEST_BOUNDS}
    done = subprocess.run(
        [sys.executable, "-c", READS_BOUNDS],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == 2 * [REQUEST_BOUNDS["VLLM_MAX_STOP_STRINGS"]]


def test_bounds_that_the_operator_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MAX_STOP_STRINGS", "1000")
    monkeypatch.delenv("VLLM_MAX_NUM_BAD_WORDS", raising=False)
    launch_module.prepare()
    bounds = {name: os.environ[name] for name in REQUEST_BOUNDS}
    assert bounds == {**REQUEST_BOUNDS, "VLLM_MAX_STOP_STRINGS": "1000"}


def test_an_argument_that_vllm_does_not_have_is_one_of_engine_args() -> None:
    given = {"model": str(EMBEDDED / "target"), "engine_args": '{"no_such_argument": 1}'}
    with pytest.raises(StartupError, match=r"engine_args: .*no_such_argument"):
        launch_module.launch(load(given, {}), EngineLoad(), StartPath.NO_DRAFTS)


def test_a_type_error_of_something_else_is_told_as_what_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fault: one from a model's damaged config.json was told as `engine_args`."""

    def damaged(*_: Any, **__: Any) -> None:
        raise TypeError("'NoneType' object is not iterable")

    monkeypatch.setattr(launch_module, "server_config", damaged)
    with pytest.raises(TypeError, match="not iterable"):
        launch_module.launch(
            load({"model": str(EMBEDDED / "target")}, {}), EngineLoad(), StartPath.NO_DRAFTS
        )
