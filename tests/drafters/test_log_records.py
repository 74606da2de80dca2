"""No text of a request can look like a line of the log, whichever logger writes it."""

from __future__ import annotations

import importlib.util
import io
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drafters.log_records import MARGIN, escape, escape_log_records

FORGED = "2026-01-01 00:00:00,000 ERROR all keys revoked"
BREAKS = ["\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x1e", "\x85", "\u2028", "\u2029"]


@pytest.fixture(autouse=True)
def safe_records() -> Iterator[None]:
    factory = logging.getLogRecordFactory()
    escape_log_records()
    yield
    logging.setLogRecordFactory(factory)


def logged(formatter: logging.Formatter, message: object, *args: object, **how: bool) -> str:
    """What a library's own logger writes, which passes nothing on to the root."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.Logger("library.of.somebody")
    logger.addHandler(handler)
    logger.warning(message, *args, **how)
    return stream.getvalue()


@pytest.mark.parametrize("end", BREAKS)
@pytest.mark.parametrize("way", ["argument", "message", "object"])
def test_a_message_is_one_line(end: str, way: str) -> None:
    text = f"rs_1{end}{FORGED}"
    plain = logging.Formatter()
    if way == "argument":
        written = logged(plain, "item %s is odd", text)
    elif way == "message":
        written = logged(plain, f"item {text} is odd")
    else:
        written = logged(plain, ValueError(text))
    assert len(written.splitlines()) == 1
    assert FORGED in written


@pytest.mark.parametrize("text", ["\x1b[2J\x1b[1A", "\x9b2J", "\x07\x08\x00", "\x7f", "\u202eabc"])
def test_nothing_moves_the_cursor_or_turns_the_writing(text: str) -> None:
    assert escape(text).isprintable()
    assert logged(logging.Formatter(), "%s", text).rstrip("\n").isprintable()


def test_other_text_stays_as_it_is() -> None:
    text = "tab\tback\\slash 100% – ü 你好 \U0001f600"
    assert escape(text) == text
    assert escape(escape("a\nb")) == escape("a\nb") == r"a\nb"
    assert logged(logging.Formatter(), "%s of %d", text, 7) == f"{text} of 7\n"


@pytest.mark.parametrize("end", BREAKS)
def test_a_stack_trace_keeps_its_lines_and_marks_them(end: str) -> None:
    try:
        raise ValueError(f"bad item{end}{FORGED}\x1b[2J")
    except ValueError:
        written = logged(logging.Formatter(), "failed", exc_info=True)
    first, *trace = written.splitlines()
    assert first == "failed"
    assert len(trace) >= 3
    assert all(line.startswith(MARGIN) for line in trace)
    assert trace[0] == f"{MARGIN}Traceback (most recent call last):"
    assert "\x1b" not in written


def test_arguments_that_do_not_fit_are_the_handlers_to_report(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert logged(logging.Formatter(), "%d of %d", f"\n{FORGED}") == ""
    reported = capsys.readouterr().err
    assert "Logging error" in reported
    assert FORGED not in reported.splitlines()


def test_another_factory_around_it_changes_nothing() -> None:
    """vLLM wraps the record factory to add attributes, and may do so before or after."""

    def installed_later(*args: object, **kwargs: object) -> logging.LogRecord:
        record = inner(*args, **kwargs)
        record.process_name = "core"
        return record

    inner = logging.getLogRecordFactory()
    logging.setLogRecordFactory(installed_later)
    formatter = logging.Formatter("%(process_name)s %(message)s")
    for _ in range(3):
        assert logged(formatter, "%s", f"a\n{FORGED}") == rf"core a\n{FORGED}" + "\n"
        escape_log_records()


def vllms_formatters() -> Any:
    """vLLM's module of formatters, loaded without vLLM, which takes long to import."""
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        pytest.skip("vllm is not installed")
    path = Path(package.submodule_search_locations[0]) / "logging_utils" / "formatter.py"
    spec = importlib.util.spec_from_file_location("vllms_formatters", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["NewLineFormatter", "ColoredFormatter"])
def test_vllms_own_formatters_are_no_way_around(name: str) -> None:
    """They put their prefix in front of every line, which makes a forged one look genuine."""
    formatter = getattr(vllms_formatters(), name)("PREFIX [%(fileinfo)s] %(message)s")
    written = logged(formatter, "Using summary text for item %s.", f"rs_1\n{FORGED}\x1b[2J")
    assert written.endswith(rf"item rs_1\n{FORGED}\x1b[2J." + "\n")
    assert len(written.splitlines()) == 1
    try:
        raise ValueError(f"bad\n{FORGED}")
    except ValueError:
        trace = logged(formatter, "failed", exc_info=True).splitlines()
    (quoted,) = (line for line in trace if FORGED in line)
    assert quoted.endswith(f"{MARGIN}{FORGED}")
