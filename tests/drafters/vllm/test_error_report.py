"""The engine's processes say what ended them, in a file of the gateway."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from vllm.config.logging import LoggingConfig
from vllm.logger import configure_logging
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from drafters.vllm import error_report
from drafters.vllm.error_report import (
    FILE,
    LOGGERS,
    SURVIVED,
    ErrorReport,
    ErrorReports,
    fatal_report,
    first_report,
    install,
)


def _fail(name: str) -> None:
    """As an engine core does that ends: log the exception."""
    logger = logging.getLogger(name)
    try:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise MemoryError("no room\nfor it") from error
    except MemoryError:
        logger.exception("EngineCore failed to start.")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "errors"
    monkeypatch.setenv(FILE, str(path))
    install()
    install()
    return path


@pytest.mark.parametrize("name", LOGGERS)
def test_a_process_of_the_engine_reports_its_exception_once(file: Path, name: str) -> None:
    process = multiprocessing.get_context("fork").Process(target=_fail, args=(name,))
    process.start()
    process.join()
    [line] = file.read_text().splitlines()
    report = first_report(file)
    assert report is not None and report.line() == line
    assert report.types[0] == "builtins.MemoryError"
    assert report.message == "MemoryError: no room for it"
    assert report.frames.count((__name__, "_fail")) == 2, "of the error, and of its cause"


def _configure_and_fail(name: str) -> None:
    configure_logging(LoggingConfig())
    _fail(name)


def test_they_outlive_vllms_configuration_of_its_loggers(file: Path) -> None:
    """vLLM configures them with every engine's configuration, and again in each process. A process
    that is forked loads no plugins: the fault was that nothing came from there."""
    configure_logging(LoggingConfig())
    process = multiprocessing.get_context("fork").Process(
        target=_configure_and_fail, args=(LOGGERS[0],)
    )
    process.start()
    process.join()
    report = first_report(file)
    assert report is not None and report.message == "MemoryError: no room for it"


def test_nothing_else_reports(file: Path) -> None:
    """Neither the gateway's own process nor other loggers: their errors end no engine."""
    _fail(LOGGERS[0])
    process = multiprocessing.get_context("fork").Process(target=_fail, args=("vllm.other",))
    process.start()
    process.join()
    assert not file.exists()
    assert first_report(file) is None
    assert fatal_report(file) is None


def _serve(calls: int, then: str) -> None:
    """As an engine core does whose calls fail, and which ends later or is killed."""
    logger = logging.getLogger(LOGGERS[0])
    for i in range(calls):
        try:
            raise ValueError(f"head {i}")
        except ValueError:
            logging.getLogger(LOGGERS[1]).exception("WorkerProc hit an exception.")
            logger.exception(SURVIVED[0], "collective_rpc")
    for message in then.split():
        try:
            raise RuntimeError(message)
        except RuntimeError:
            logger.exception("EngineCore encountered a fatal error.")


@pytest.mark.parametrize(
    ("calls", "then", "message"),
    [
        (2, "", None),
        (2, "fault consequence", "RuntimeError: fault"),
        (0, "fault", "RuntimeError: fault"),
    ],
)
def test_what_the_engine_survived_did_not_end_it(
    file: Path, calls: int, then: str, message: str | None
) -> None:
    """Catches: an engine killed for want of memory, put down to a head refused an hour before."""
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(calls, then))
    process.start()
    process.join()
    report, first = fatal_report(file), first_report(file)
    assert (report and report.message) == message
    assert first is not None
    assert first.message == ("ValueError: head 0" if calls else message), "a start ends with it"


class _Executor:
    """What vLLM's watch of its workers needs of an executor, whose one worker is killed."""

    is_failed, failure_callback = False, None

    def __init__(self) -> None:
        kill = partial(signal.raise_signal, signal.SIGKILL)
        worker = multiprocessing.get_context("fork").Process(target=kill, name="VllmWorker-1")
        worker.start()
        worker.join()  # its sentinel is ready a moment before its exit code is known
        self.workers = [SimpleNamespace(proc=worker)]

    def shutdown(self) -> None:
        """As the engine core, whose wait for the worker that is cut off."""
        try:
            raise RuntimeError("cancelled")
        except RuntimeError:
            logging.getLogger(LOGGERS[0]).exception("EngineCore encountered a fatal error.")


def _lose_a_worker() -> None:
    executor = cast("MultiprocExecutor", _Executor())
    MultiprocExecutor.start_worker_monitor(executor, inline=True)


def test_a_worker_that_was_killed_is_what_ended_the_engine(file: Path) -> None:
    """The fault: "RuntimeError: cancelled", which its end raises in the engine core. The monitor is
    vLLM's own, and logs no exception."""
    process = multiprocessing.get_context("fork").Process(target=_lose_a_worker)
    process.start()
    process.join()
    report = fatal_report(file)
    assert report is not None and report == first_report(file)
    assert "VllmWorker-1 died unexpectedly (exit code: -9)" in report.message
    assert not report.types
    assert report.frames == ((LOGGERS[1], "monitor_workers"),)


def test_workers_that_report_at_once_do_not_tear_each_others_lines(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a report of many frames that is written in parts, and another one between them."""
    writes = list[int]()
    write = os.write

    def count(handle: int, data: bytes) -> int:
        writes.append(len(data))
        return write(handle, data)

    monkeypatch.setattr(os, "write", count)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    report = ErrorReport(("T",), "m", (("module", "function"),) * 4000)
    monkeypatch.setattr(ErrorReport, "of", lambda *_, **__: report)
    error = RuntimeError("fault")
    info = (RuntimeError, error, None)
    ErrorReports().filter(logging.LogRecord("a", logging.ERROR, "", 0, "", None, info))
    assert writes == [len(report.line()) + 1]
    assert first_report(file) == report


def test_a_torn_report_is_none(file: Path) -> None:
    line = ErrorReport.of(RuntimeError("fault")).line()
    file.write_text(f"{line}\n{line[:20]}")
    assert fatal_report(file) == first_report(file) == ErrorReport.of(RuntimeError("fault"))
    file.write_text(line[:20])
    assert fatal_report(file) is first_report(file) is None
    file.write_text(f"{line[:20]}\n{line}\n")
    assert fatal_report(file) == first_report(file) == ErrorReport.of(RuntimeError("fault"))


def test_vllm_logs_what_ends_a_process_with_these_loggers() -> None:
    """Catches: a vLLM that moves the code, after which no cause would be told."""
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor as executor

    for module, text in (
        (vllm.v1.engine.core, "EngineCore failed to start."),
        (vllm.v1.engine.core, "EngineCore encountered a fatal error."),
        (executor, "WorkerProc failed to start."),
        (executor, "WorkerProc hit an exception."),
    ):
        assert module.logger.name in LOGGERS
        assert f'logger.exception("{text}")' in Path(str(module.__file__)).read_text()
    core = " ".join(Path(str(vllm.v1.engine.core.__file__)).read_text().split())
    for text in SURVIVED:
        assert re.search(rf'logger\.exception\( ?"{re.escape(text)}"', core), text


def test_a_message_is_bounded() -> None:
    report = ErrorReport.of(RuntimeError("x" * 10_000))
    assert len(report.message) == error_report.MAX_MESSAGE
    assert os.linesep not in report.line()


def test_an_error_without_a_text_says_which_line_raised_it() -> None:
    """Catches: "AssertionError", which is all that vLLM says of weights of another shape."""

    def load(given: int, wanted: int) -> None:
        assert given == wanted

    with pytest.raises(AssertionError) as told:
        load(1, 2)
    told.value.args = ()  # pytest writes a text into assertions of tests
    assert ErrorReport.of(told.value).message == "AssertionError in load: assert given == wanted"
    assert ErrorReport.of(AssertionError()).message == "AssertionError"
