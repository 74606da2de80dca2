"""Why an engine did not start, and what that is put down to.

vLLM raises "Engine core initialization failed. See root cause above" whatever happened. The cause
comes from the engine's processes (drafters/vllm/error_report.py), and the frames that it passed say
which part of the start broke.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from app.engine.configuration.options import TORCHVISION_FOR_A_CPU
from app.engine.configuration.runner import Blame, StartPath
from app.errors import StartupError
from drafters.vllm.error_report import FILE, MAX_MESSAGE, ErrorReport, fatal_report, first_report

# Kinds of reasons: values of the metric's label `reason`. "none" is no failure.
REASONS = (
    "none", "unsupported", "refused", "head", "memory", "compilation", "non_finite", "no_drafts",
    "ended", "hung", "other",
)  # fmt: skip

# Code that drafts or verifies drafts; all else of drafters/vllm only wraps the target's own calls.
_DRAFTING = (
    *("vllm.v1.worker.gpu.spec_decode.", "vllm.v1.spec_decode."),
    *(
        "drafters.ops.",
        "drafters.lookup.",
        "drafters.vllm.own_drafter",
        "drafters.vllm.v1.",
        "drafters.vllm.v2.",
    ),
)
_WRAPPERS = (
    "drafters.vllm.worker",
    "drafters.vllm.v1.runner",
    "drafters.vllm.v2.runner",
    "drafters.vllm.v2.timing",
)
_LOADERS = ("vllm.model_executor.model_loader.",)
_V2_RUNNER = ("vllm.v1.worker.gpu.", "vllm.v1.worker.cpu.")
# Exceptions of compilers, and code of theirs that no launch of a compiled kernel passes.
_COMPILER_ERRORS = ("triton.", "torch._inductor.", "torch._dynamo.")
_COMPILERS = ("triton.compiler.", "triton.backends.", "flashinfer.jit", "torch.utils.cpp_extension")
# What comes after the target was loaded: methods of vLLM's engine core and worker.
_AFTER_LOADING = {
    *("_initialize_kv_caches", "determine_available_memory", "initialize_from_config"),
    *("compile_or_warm_up_model", "execute_model", "sample_tokens", "run_busy_loop"),
    "monitor_workers",  # of vLLM's executor, which begins once all workers have loaded
}
# The context does not fit into the KV cache (vllm/v1/core/kv_cache_utils.py).
_CAPACITY = {"check_enough_kv_cache_memory", "_check_enough_kv_cache_memory"}
_OUT_OF_MEMORY = re.compile(r"out of memory", re.IGNORECASE)
_NOT_IMPORTED = "to be inspected"  # vllm/model_executor/models/registry.py
_ENDED = "Engine core initialization failed"  # vllm/v1/engine/utils.py
# -9 is the exit code of SIGKILL: of the engine core, and of a worker that had loaded. Of a worker
# vLLM says None if it looks too soon; that may be a crash, after which another path may work.
_KILLED = re.compile(r"Failed core proc\(s\): \{[^}]*: -9\b|\(exit code: -9\)")
# What the engine core raises when a worker ended before it had loaded. It comes first only where
# the worker reported nothing (vllm/v1/executor/multiproc_executor.py).
_WORKER_ENDED = "WorkerProc initialization failed"


class StartFailureError(StartupError):
    """A start that failed on one path, with what may work instead.

    `blame` is what the failure is put down to, `reason` its kind (one of REASONS).
    """

    def __init__(self, message: str, blame: Blame, reason: str) -> None:
        assert reason in REASONS
        super().__init__(message)
        self.blame = blame
        self.reason = reason


@dataclass(frozen=True)
class Fallback:
    """Why the engine runs on another path than its first choice.

    `failed` is the path that was to run, `reason` the kind of its failure (one of REASONS).
    """

    failed: StartPath
    reason: str
    message: str

    def __str__(self) -> str:
        verb = "cannot run this" if self.reason == "unsupported" else "failed"
        return f"{self.failed} {verb} ({self.reason}): {self.message}"


class EngineErrors:
    """The file in which the processes of one engine report what ended them."""

    def __init__(self) -> None:
        # Whoever empties /tmp may have removed the gateway's folder since it started.
        Path(tempfile.gettempdir()).mkdir(mode=0o700, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix="engine-errors-")
        os.close(handle)
        self._file = Path(name)
        os.environ[FILE] = name  # the engine's processes inherit it

    def first(self) -> ErrorReport | None:
        """The first error; None if no process reported one."""
        return first_report(self._file)

    def fatal(self) -> ErrorReport | None:
        """The error that ended an engine in service; None if no process reported one."""
        return fatal_report(self._file)

    def remove(self) -> None:
        """Remove the file with the reports."""
        self._file.unlink(missing_ok=True)


def start_failure(error: Exception, report: ErrorReport | None) -> StartupError:
    """The failure of a start that raised `error` in the gateway, where the engine's processes left
    `report`. That an engine ended or hangs is what the report explains."""
    known = isinstance(error, StartFailureError) and error.reason not in ("ended", "hung")
    if report is not None and not known:
        if (killed := _killed(report.message)) is not None:
            return killed
        blame = blame_of(report)
        message = report.message
        if blame is Blame.HEAD:
            message = f"the head does not load: {message}"
        return StartFailureError(message, blame, reason_of(report, blame))
    if isinstance(error, StartupError):
        return error
    text = str(error).strip() or type(error).__name__
    if (killed := _killed(text)) is not None:
        return killed
    if _ENDED in text:
        return StartFailureError(text, Blame.RUNNER, "ended")
    if _NOT_IMPORTED in text and find_spec("torchvision") is None:
        text += f" There is no torchvision, which its class may need: {TORCHVISION_FOR_A_CPU}"
    return StartupError(text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]} ...")


def _killed(text: str) -> StartFailureError | None:
    """The failure of an engine of which a process was killed, as `text` says; None if it does not.
    The kernel's out-of-memory killer did it, most likely: no path works."""
    if _KILLED.search(text):
        end = "the engine was killed"
    elif _WORKER_ENDED in text:
        end = "a worker of the engine ended without a message, killed"
    else:
        return None
    message = f"{end}, most likely for want of this machine's memory: {text}"
    return StartFailureError(message, Blame.TARGET, "ended")


def blame_of(report: ErrorReport) -> Blame:
    """What an error in the engine's processes is put down to, by the code that it passed."""
    modules = {module for module, _ in report.frames}
    functions = {function for _, function in report.frames}
    drafting = any(module.startswith(_DRAFTING) and module not in _WRAPPERS for module in modules)
    if _any_in(modules, _LOADERS):
        return Blame.HEAD if drafting else Blame.TARGET
    if functions & _CAPACITY:
        return Blame.TARGET
    after = bool(functions & _AFTER_LOADING)
    if drafting or (after and _is_out_of_memory(report)):
        return Blame.DRAFTS
    return Blame.RUNNER if after or _any_in(modules, _V2_RUNNER) else Blame.TARGET


def reason_of(report: ErrorReport, blame: Blame) -> str:
    """The kind of an error, one of REASONS."""
    if not report.types:  # a worker that crashed
        return "ended"
    if _is_out_of_memory(report):
        return "memory"
    modules = {module for module, _ in report.frames}
    if report.types[0].startswith(_COMPILER_ERRORS) or _any_in(modules, _COMPILERS):
        return "compilation"
    if blame is Blame.HEAD:
        return "head"
    return "refused" if "builtins.NotImplementedError" in report.types else "other"


def _is_out_of_memory(report: ErrorReport) -> bool:
    memory = any(name.endswith(("OutOfMemoryError", ".MemoryError")) for name in report.types)
    return memory or _OUT_OF_MEMORY.search(report.message) is not None


def _any_in(modules: Collection[str], prefixes: tuple[str, ...]) -> bool:
    return any(module.startswith(prefixes) for module in modules)
