"""Where an operation's work is done, and whose mistake an error is."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import BaseModel
from vllm.exceptions import GenerationError, VLLMValidationError

from app.declaration.endpoint import Endpoint
from app.endpoints.messages import MessagesFormat
from app.endpoints.responses import ResponsesFormat
from app.llm import vllm_errors
from app.llm.async_llm import refuse_too_many_repeats
from app.llm.first_token import settle_first_token
from app.request_usage import RequestUsage, current_usage, set_current_usage
from app.serving.events import events
from app.serving.operation import Operation


class Answer(BaseModel):
    """What a serving class returns."""


async def call(request: Any) -> Answer:
    return Answer()


def body(answer: BaseModel) -> dict[str, Any]:
    return {"written in": threading.current_thread().name}


def endpoint_of(answers: Any, prompt: str, **declared: bool) -> Endpoint:
    flags = {"scores_prompts": False, "echoes_tools": False} | declared
    names: dict[str, str] = {}
    return cast(
        Endpoint, SimpleNamespace(answers=answers, prompt=prompt, names_in_errors=names, **flags)
    )


@pytest.mark.parametrize(
    ("width", "tokens", "beside"),
    [(0, 1000, False), (6, 10, False), (6, 1000, True)],
)
def test_an_answer_with_many_log_probabilities_is_written_beside_the_event_loop(
    width: int, tokens: int, beside: bool
) -> None:
    endpoint = endpoint_of(SimpleNamespace(body=body), "prompt")
    operation = Operation(endpoint, lambda payload: Answer(), call, lambda payload: None)

    async def scenario() -> Any:
        usage = RequestUsage()
        usage.count_alternatives(output_tokens=131_072, output_width=width)
        usage.enter(
            SimpleNamespace(
                request_index=0,
                prompt_len=5,
                num_cached_tokens=0,
                stats=SimpleNamespace(first_token_ts=0.0),
                detokenizer=SimpleNamespace(num_output_tokens=lambda: tokens),
                spec_decode_metrics=None,
            ),
            (),
        )
        set_current_usage(usage)
        return (await operation({})).answer

    thread = asyncio.run(scenario())["written in"]
    assert thread.startswith("aerie-body") is beside


TOOLS = [{"type": "function", "name": "f"}]


@pytest.mark.parametrize(
    ("payload", "size", "beside"),
    [
        ({"return_token_ids": True}, 100, True),
        ({"echo": True}, 100, True),
        ({}, 100_000, False),
        ({"tools": TOOLS}, 100_000, True),
        ({"tools": TOOLS}, 100, False),
        ({"tools": []}, 100_000, False),
    ],
)
def test_an_answer_that_repeats_much_of_its_request_is_written_beside_the_event_loop(
    payload: dict[str, Any], size: int, beside: bool
) -> None:
    endpoint = endpoint_of(
        SimpleNamespace(body=body), "prompt", scores_prompts=True, echoes_tools=True
    )

    async def repeating(request: Any) -> Answer:
        usage = current_usage()
        assert usage is not None
        refuse_too_many_repeats(usage, {"prompt_token_ids": [9] * 1000}, 2)
        return Answer()

    operation = Operation(endpoint, lambda payload: Answer(), repeating, lambda payload: None)

    async def scenario() -> Any:
        set_current_usage(RequestUsage())
        return (await operation(dict(payload), size)).answer

    thread = asyncio.run(scenario())["written in"]
    assert thread.startswith("aerie-body") is beside


class NamesThread(ResponsesFormat):
    """Writes which thread writes an event."""

    def event(self, item: Any, *, null_usage: bool = False) -> str:
        return f"{item.type} {threading.current_thread().name}"


def test_events_that_repeat_a_large_answer_are_written_beside_the_event_loop() -> None:
    """Catches: streams that stand still for seconds while one ends with its log probabilities."""
    response = SimpleNamespace(status="completed", output=[])
    items = [
        SimpleNamespace(type="response.created", response=response),
        SimpleNamespace(type="response.output_text.delta"),
        SimpleNamespace(type="response.content_part.done", part=None),
        SimpleNamespace(type="response.output_item.done", item=None),
        SimpleNamespace(type="response.completed", response=response),
    ]

    async def stream() -> AsyncGenerator[Any, None]:
        for item in items:
            yield item

    async def scenario(size: int) -> list[bool]:
        usage = RequestUsage()
        usage.echoed_bytes = size
        set_current_usage(usage)
        written = [text async for text in events(stream(), NamesThread(), vllm_errors.internal)]
        assert [text.partition(" ")[0] for text in written] == [item.type for item in items]
        return ["aerie-body" in text for text in written]

    assert asyncio.run(scenario(100_000)) == [True, False, True, True, True]
    assert not any(asyncio.run(scenario(100)))


async def refusing(error: Exception) -> AsyncGenerator[str, None]:
    """A stream of Messages whose request the engine refuses before its first token.

    vLLM writes an event that quotes the error (vllm/entrypoints/anthropic/serving.py,
    message_stream_converter).
    """

    async def outputs() -> AsyncGenerator[str, None]:
        raise error
        yield ""

    try:
        async for output in settle_first_token(outputs()):
            yield output
    except Exception as broken:
        yield f'event: error\ndata: {{"type":"error","error":{{"message":"{broken}"}}}}\n\n'


@pytest.mark.parametrize(
    ("error", "status", "records"),
    [
        (VLLMValidationError("'top_k' is odd.", parameter="top_k"), 400, 0),
        (GenerationError(), 500, 1),
    ],
)
def test_only_a_failure_of_the_server_is_logged_as_one(
    caplog: pytest.LogCaptureFixture, error: Exception, status: int, records: int
) -> None:
    endpoint = endpoint_of(MessagesFormat(), "messages")

    async def streamed(request: Any) -> AsyncGenerator[str, None]:
        return refusing(error)

    operation = Operation(endpoint, lambda payload: Answer(), streamed, lambda payload: None)

    async def scenario() -> tuple[str, int]:
        reply = await operation({})
        assert not isinstance(reply.answer, dict)
        (event,) = [event async for event in reply.answer]
        assert reply.first.error is not None
        with caplog.at_level(logging.CRITICAL):
            return event, operation.failure(reply.first.error, {}, reply.first).status

    with caplog.at_level(logging.ERROR):
        event, told = asyncio.run(scenario())
    assert told == status
    assert ("'top_k' is odd." in event) is (status == 400)
    assert len(caplog.records) == records
