"""Answers are counted once each, under labels that no client chooses (test_auth.py has the lines of
the log)."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import REGISTRY
from starlette.types import Receive, Scope, Send

from app.http.access_log import AccessLogMiddleware

PATH = "/v1/tallied"


def counted(status: str, path: str = PATH) -> float:
    labels = {"path": path, "status": status}
    return REGISTRY.get_sample_value("aerie_responses_total", labels) or 0.0


def request(status: int | Exception | None, path: str = PATH) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if isinstance(status, Exception):
            raise status
        if status is not None:
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    async def send(message: object) -> None:
        pass

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "path": path, "method": "POST"}
    asyncio.run(AccessLogMiddleware(app, frozenset({PATH}))(scope, receive, send))


@pytest.mark.parametrize(("status", "label"), [(200, "200"), (429, "429"), (None, "none")])
def test_an_answer_is_counted_once(status: int | None, label: str) -> None:
    before = counted(label)
    request(status)
    assert counted(label) == before + 1


def test_a_defect_counts_as_the_500_that_it_becomes() -> None:
    before, unanswered = counted("500"), counted("none")
    with pytest.raises(KeyError):
        request(KeyError("a defect"))
    assert (counted("500"), counted("none")) == (before + 1, unanswered)


def test_a_path_of_a_clients_own_is_no_label() -> None:
    request(404, "/v1/made-up")
    assert counted("404", "/v1/made-up") == 0
