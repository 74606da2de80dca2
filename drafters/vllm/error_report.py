"""Reports of what ended a process of the engine, for the gateway that started it.

vLLM logs the exception in the process where it arose; its parent learns that a process ended, and
no reason. The filter below writes those exceptions, and the end of a worker that was killed, into a
file that the gateway names in the environment. Standard library only: the gateway reads the file
before vllm is imported.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from traceback import extract_tb, walk_tb

FILE = "DRAFTERS_ENGINE_ERRORS"  # variable with the file that reports are appended to
# The loggers of vLLM whose exceptions end a process: engine core, and workers of its own.
LOGGERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
# What the engine core logs when a call to it or a request failed, and it goes on.
SURVIVED = ("Invocation of %s method failed", "Unexpected error pre-processing request %s")
# What the engine core logs when a worker has ended, without an exception: the worker was killed, or
# crashed. What the core raises next, "cancelled", says nothing of it.
WORKER_DIED = "Worker proc %s died unexpectedly (exit code: %s), shutting down executor."
MAX_MESSAGE = 2000  # characters


@dataclass(frozen=True)
class ErrorReport:
    """An exception that vLLM logged in a process of the engine, or the end of a worker.

    `types` has the exception's class and its bases, `frames` the module and function of each frame
    that it and its causes passed, outermost first. For the end of a worker `types` is empty, and
    `frames` has the function that noticed. `survived` is whether the engine core went on.
    """

    types: tuple[str, ...]
    message: str
    frames: tuple[tuple[str, str], ...]
    survived: bool = False

    @classmethod
    def of(cls, error: BaseException, *, survived: bool = False) -> ErrorReport:
        """The report of an exception."""
        return cls(
            tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__),
            _text(error)[:MAX_MESSAGE],
            tuple(
                (frame.f_globals.get("__name__", "?"), frame.f_code.co_name)
                for cause in _causes(error)
                for frame, _ in walk_tb(cause.__traceback__)
            ),
            survived,
        )

    @classmethod
    def of_ended_worker(cls, record: logging.LogRecord) -> ErrorReport:
        """The report of a worker's end, as the engine core logged it."""
        return cls((), record.getMessage()[:MAX_MESSAGE], ((record.name, record.funcName or "?"),))

    def line(self) -> str:
        """The report as one line of JSON."""
        return json.dumps(asdict(self))


class ErrorReports(logging.Filter):
    """Appends what vLLM logs in a process of the engine to the gateway's file, if it may end the
    engine: exceptions, and the end of a worker. Every record passes.

    No handler: vLLM configures its loggers anew with each configuration and in each process
    (vllm/logger.py, configure_logging), which takes away their handlers and leaves their filters. A
    process that is forked loads no plugins again, which would put a handler back.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Append the record's report; nothing in the gateway's own process."""
        file, is_of_engine = os.environ.get(FILE), multiprocessing.parent_process() is not None
        if file and is_of_engine and (report := _report_of(record)) is not None:
            with suppress(OSError):  # on a full disk the log still has it
                _append(file, report.line() + "\n")
        return True


def _report_of(record: logging.LogRecord) -> ErrorReport | None:
    """The report of a record; None if it does not tell of what may end the engine."""
    error = record.exc_info and record.exc_info[1]
    if record.levelno < logging.ERROR:
        return None
    if error is not None:
        return ErrorReport.of(error, survived=record.msg in SURVIVED)
    return ErrorReport.of_ended_worker(record) if record.msg == WORKER_DIED else None


def _append(file: str, line: str) -> None:
    """Append a line with one call of the system: workers report at the same time, and a buffer
    would write a line of more than 8 KiB in parts, with another worker's between them."""
    handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)


def install() -> None:
    """Have this process report what ends it. Safe to call again."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(kept, ErrorReports) for kept in logger.filters):
            logger.addFilter(ErrorReports())


def first_report(file: Path) -> ErrorReport | None:
    """The first report in a file: what follows it are consequences. None if there is none.

    For an engine that did not start: one whose call failed ends, too.
    """
    return next(iter(_reports(file)), None)


def fatal_report(file: Path) -> ErrorReport | None:
    """The first report of what ended an engine in service: reports up to the last one that its core
    survived are of calls and requests that failed before. None if there is none."""
    fatal: ErrorReport | None = None
    for report in _reports(file):
        if report.survived:
            fatal = None
        elif fatal is None:
            fatal = report
    return fatal


def _reports(file: Path) -> Iterator[ErrorReport]:
    try:
        lines = file.read_text("utf-8", "replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            fields = json.loads(line)
        except ValueError:  # cut off by a full disk
            continue
        frames = tuple((module, function) for module, function in fields["frames"])
        yield ErrorReport(tuple(fields["types"]), fields["message"], frames, fields["survived"])


def _text(error: BaseException) -> str:
    """The class of an exception and what it says; without a text, the line that raised it. vLLM
    asserts that weights have the shape of their parameters, and says nothing more."""
    name, text = type(error).__name__, " ".join(str(error).split())
    if text:
        return f"{name}: {text}"
    stack = extract_tb(error.__traceback__)
    return f"{name} in {stack[-1].name}: {stack[-1].line}" if stack else name


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, and those that led to it."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
