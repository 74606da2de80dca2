"""What a failed start is put down to, from the errors that the engine's processes report."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from app.engine.configuration.options import TORCHVISION_FOR_A_CPU
from app.engine.configuration.runner import Blame
from app.engine.start_failure import (
    REASONS,
    EngineErrors,
    StartFailureError,
    blame_of,
    reason_of,
    start_failure,
)
from app.errors import StartupError
from drafters.vllm.error_report import ErrorReport

CORE = (("vllm.v1.engine.core", "run_engine_core"), ("vllm.v1.engine.core", "__init__"))
CACHES = (*CORE, ("vllm.v1.engine.core", "_initialize_kv_caches"))
LOAD_V1 = (*CORE, ("vllm.v1.worker.gpu_model_runner", "load_model"))
LOAD_V2 = (
    *CORE,
    ("drafters.vllm.v2.runner", "load_model"),
    ("vllm.v1.worker.gpu.model_runner", "load_model"),
)
LOADER = ("vllm.model_executor.model_loader.base_loader", "load_model")
V1_HEAD = ("vllm.v1.spec_decode.llm_base_proposer", "load_model")
V2_HEAD = ("vllm.v1.worker.gpu.spec_decode.eagle.utils", "load_eagle_model")
CAPTURE = (*CACHES, ("vllm.v1.worker.gpu_worker", "compile_or_warm_up_model"))
STEP = (("vllm.v1.engine.core", "run_busy_loop"), ("vllm.v1.worker.gpu_worker", "execute_model"))
WATCH = (("vllm.v1.executor.multiproc_executor", "monitor_workers"),)
OOM = ("torch.OutOfMemoryError", "builtins.RuntimeError")
VALUE, RUNTIME = ("builtins.ValueError",), ("builtins.RuntimeError",)


@pytest.mark.parametrize(
    ("types", "frames", "blame", "reason"),
    [
        # Before the target is loaded, and while it is: nothing else would work.
        (VALUE, (*CORE, ("vllm.v1.worker.gpu_worker", "init_device")), Blame.TARGET, "other"),
        (OOM, (*LOAD_V1, LOADER), Blame.TARGET, "memory"),
        (OOM, (*LOAD_V2, LOADER), Blame.TARGET, "memory"),
        (
            VALUE,
            (*CACHES, ("vllm.v1.core.kv_cache_utils", "_check_enough_kv_cache_memory")),
            Blame.TARGET,
            "other",
        ),
        # The head's checkpoint: neither runner can load it.
        (RUNTIME, (*LOAD_V1, V1_HEAD, LOADER), Blame.HEAD, "head"),
        (VALUE, (*LOAD_V2, V2_HEAD, LOADER), Blame.HEAD, "head"),
        (OOM, (*LOAD_V2, V2_HEAD, LOADER), Blame.HEAD, "memory"),
        # What drafts.
        (
            ("builtins.NotImplementedError", *RUNTIME),
            (*CACHES, ("drafters.vllm.v2.speculator", "set_attn")),
            Blame.DRAFTS,
            "refused",
        ),
        (
            ("triton.compiler.errors.CompilationError",),
            (*STEP, ("drafters.ops.inputs_triton", "plan")),
            Blame.DRAFTS,
            "compilation",
        ),
        (OOM, CAPTURE, Blame.DRAFTS, "memory"),
        # All else after the target was loaded.
        (RUNTIME, CAPTURE, Blame.RUNNER, "other"),
        (RUNTIME, (*STEP, ("flashinfer.jit.core", "build")), Blame.RUNNER, "compilation"),
        (RUNTIME, (*CORE, ("vllm.v1.worker.gpu.model_runner", "__init__")), Blame.RUNNER, "other"),
        # A launch of a compiled kernel passes torch's compiler, too.
        (RUNTIME, (*STEP, ("torch._dynamo.eval_frame", "_fn")), Blame.RUNNER, "other"),
    ],
)
def test_the_code_that_an_error_passed_says_what_is_to_blame(
    types: tuple[str, ...], frames: tuple[tuple[str, str], ...], blame: Blame, reason: str
) -> None:
    report = ErrorReport(types, "RuntimeError: it broke", frames)
    assert blame_of(report) is blame
    assert reason_of(report, blame) == reason
    assert reason in REASONS


def test_an_error_of_the_driver_is_recognised_by_its_text() -> None:
    """A capture fails with it: torch's own error is for its allocator only."""
    report = ErrorReport(RUNTIME, "RuntimeError: CUDA error: out of memory", CAPTURE)
    assert (blame_of(report), reason_of(report, Blame.DRAFTS)) == (Blame.DRAFTS, "memory")


HIDDEN = RuntimeError(
    "Engine core initialization failed. See root cause above. Failed core proc(s): "
    "{'EngineCore': 1}"
)


def test_what_the_engine_reports_replaces_the_message_that_hides_it() -> None:
    report = ErrorReport(OOM, "OutOfMemoryError: CUDA out of memory", CAPTURE)
    failure = start_failure(HIDDEN, report)
    assert isinstance(failure, StartFailureError)
    assert str(failure) == "OutOfMemoryError: CUDA out of memory"


def test_a_head_that_does_not_load_is_named() -> None:
    """vLLM's error speaks of a parameter, not of whose it is."""
    report = ErrorReport(VALUE, "ValueError: no parameter", (*LOAD_V2, V2_HEAD, LOADER))
    assert str(start_failure(HIDDEN, report)) == "the head does not load: ValueError: no parameter"


def test_an_engine_that_died_without_a_word_may_work_on_another_runner() -> None:
    failure = start_failure(HIDDEN, None)
    assert isinstance(failure, StartFailureError) and failure.blame is Blame.RUNNER


def test_an_engine_that_the_kernel_killed_is_not_started_again() -> None:
    """For want of memory while it loads, most likely: minutes for the same end."""
    killed = RuntimeError(str(HIDDEN).replace("1}", "-9}"))
    failure = start_failure(killed, None)
    assert isinstance(failure, StartFailureError) and failure.blame is Blame.TARGET
    assert "memory" in str(failure)


@pytest.mark.parametrize(
    ("report", "blame"),
    [
        # Killed after it had loaded, before, and crashed.
        (ErrorReport((), "Worker proc VllmWorker-1 died (exit code: -9)", WATCH), Blame.TARGET),
        (
            ErrorReport(
                ("builtins.Exception",),
                "Exception: WorkerProc initialization failed due to an exception",
                (*CORE, ("vllm.v1.executor.multiproc_executor", "wait_for_ready")),
            ),
            Blame.TARGET,
        ),
        (ErrorReport((), "Worker proc VllmWorker-1 died (exit code: -11)", WATCH), Blame.RUNNER),
    ],
)
def test_a_worker_that_was_killed_is_told_as_an_engine_that_was(
    report: ErrorReport, blame: Blame
) -> None:
    """The fault: "RuntimeError: cancelled", and two more engines started for the same end."""
    failure = start_failure(HIDDEN, report)
    assert isinstance(failure, StartFailureError)
    assert (failure.blame, failure.reason) == (blame, "ended")
    assert ("memory" in str(failure)) == (blame is Blame.TARGET)
    assert report.message in str(failure)


def test_a_class_that_cannot_be_imported_may_lack_torchvision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fault: the way to it was in a traceback of the log alone."""
    error = ValueError("Model architectures ['Qwen3_5ForCausalLM'] failed to be inspected.")
    monkeypatch.setattr("app.engine.start_failure.find_spec", lambda name: None)
    assert TORCHVISION_FOR_A_CPU in str(start_failure(error, None))
    monkeypatch.setattr("app.engine.start_failure.find_spec", lambda name: object())
    assert "torchvision" not in str(start_failure(error, None))


def test_what_the_gateway_found_out_itself_stays() -> None:
    report = ErrorReport(RUNTIME, "RuntimeError: shutting down", STEP)
    found = StartFailureError("not finite", Blame.DRAFTS, "non_finite")
    assert start_failure(found, report) is found
    refused = StartupError("no such head")
    assert start_failure(refused, None) is refused
    died = StartFailureError("the engine died while it warmed up", Blame.RUNNER, "ended")
    assert start_failure(died, None) is died
    assert str(start_failure(died, report)) == "RuntimeError: shutting down"
    hung = StartFailureError("the engine did not load", Blame.RUNNER, "hung")
    assert start_failure(hung, None) is hung
    assert str(start_failure(hung, report)) == "RuntimeError: shutting down"
    other = start_failure(ConnectionError(), None)
    assert type(other) is StartupError and str(other) == "ConnectionError"


def test_the_first_report_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTERS_ENGINE_ERRORS", "")
    errors = EngineErrors()
    assert errors.first() is None
    file = Path(os.environ["DRAFTERS_ENGINE_ERRORS"])
    reports = [ErrorReport(RUNTIME, text, STEP) for text in ("RuntimeError: a", "RuntimeError: b")]
    file.write_text("".join(report.line() + "\n" for report in reports) + '{"types": [')
    assert errors.first() == reports[0]
    errors.remove()
    assert not file.exists() and errors.first() is None


def test_reports_have_a_place_after_the_temporary_folder_was_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: whatever empties /tmp made every later start of an engine fail."""
    monkeypatch.setenv("DRAFTERS_ENGINE_ERRORS", "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "aerie-gateway-1"))
    errors = EngineErrors()
    assert errors.first() is None
    assert (tmp_path / "aerie-gateway-1").stat().st_mode & 0o777 == 0o700
    errors.remove()
