"""A line of the log is one line, whatever is in it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest
from starlette.types import Message, Receive, Scope, Send

from app.http import access_log
from app.observability.log import Format, configure, with_fields

FIELDS = {"request_id": "req_1", "k": 3.5, "text": 'a "quoted"\nline'}


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    factory = logging.getLogRecordFactory()
    access_level = access_log.logger.level
    yield
    access_log.logger.setLevel(access_level)
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


@pytest.mark.parametrize("level", ["info", "warning", "error"])
def test_the_access_log_is_written_at_every_log_level(level: str) -> None:
    """Catches: `--log-level warning` that silences the lines which `--access-log` asks for."""
    stream = io.StringIO()
    configure(level, "text", stream)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        logging.getLogger("app.test").info("of another logger")

    scope = {"type": "http", "path": "/v1/logged", "method": "POST"}
    middleware = access_log.AccessLogMiddleware(app, frozenset({"/v1/logged"}), log=True)
    asyncio.run(middleware(scope, receive, send))
    assert "path=/v1/logged status=200" in stream.getvalue()
    assert ("of another logger" in stream.getvalue()) == (level == "info")
