"""A line of the log is one line, whatever is in it."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from app.observability.log import Format, configure, with_fields

FIELDS = {"request_id": "req_1", "k": 3.5, "text": 'a "quoted"\nline'}


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    factory = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(factory)
    root.handlers[:] = handlers
    root.setLevel(level)


def written(form: Format) -> list[str]:
    stream = io.StringIO()
    configure("info", form, stream)
    logger = logging.getLogger("app.test")
    logger.debug("too little to be written")
    logger.info("request", extra=with_fields(FIELDS))
    try:
        raise KeyError("a\ndefect")
    except KeyError:
        logger.exception("failed: %s", "x")
    return stream.getvalue().splitlines()


def test_json_is_one_object_a_line() -> None:
    first, second = (json.loads(line) for line in written("json"))
    assert first["message"] == "request"
    assert first["level"] == "info"
    assert first | FIELDS == first
    assert first["time"].endswith("+00:00")
    assert second["message"] == "failed: x"
    assert second["exception"].splitlines()[0].startswith("Traceback")


def test_text_has_the_fields_behind_the_message() -> None:
    lines = written("text")
    assert lines[0].split(" ", 2)[2] == (
        r'INFO request request_id=req_1 k=3.5 text=a "quoted"\nline'
    )
    assert any(line.startswith("  | Traceback") for line in lines)
    assert all(line.startswith("  | ") for line in lines[2:])


def test_a_client_that_ends_the_line_in_text_is_quoted() -> None:
    stream = io.StringIO()
    configure("info", "text", stream)
    logging.getLogger("any.library").warning("odd item %s", "rs_1\nFORGED LINE\x1b[2J")
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(r"odd item rs_1\nFORGED LINE\x1b[2J")
