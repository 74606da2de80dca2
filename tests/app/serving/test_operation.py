"""Where an operation's work is done."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import BaseModel

from app.declaration.endpoint import Endpoint
from app.request_usage import RequestUsage, set_current_usage
from app.serving.operation import Operation


class Answer(BaseModel):
    """What a serving class returns."""


async def call(request: Any) -> Answer:
    return Answer()


def body(answer: BaseModel) -> dict[str, Any]:
    return {"written in": threading.current_thread().name}


@pytest.mark.parametrize(("alternatives", "beside"), [(0, False), (100, False), (1000, True)])
def test_an_answer_with_many_log_probabilities_is_written_beside_the_event_loop(
    alternatives: int, beside: bool
) -> None:
    endpoint = cast(Endpoint, SimpleNamespace(answers=SimpleNamespace(body=body), prompt="prompt"))
    operation = Operation(endpoint, lambda payload: Answer(), call, lambda payload: None)

    async def scenario() -> Any:
        usage = RequestUsage()
        usage.ask_for(alternatives, 1)
        set_current_usage(usage)
        return (await operation({})).answer

    thread = asyncio.run(scenario())["written in"]
    assert thread.startswith("aerie-body") is beside
