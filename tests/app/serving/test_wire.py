"""What vLLM's serving classes give, as it goes over the wire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

from app.declaration.null_fields import without_nulls, without_streamed_nulls
from app.endpoints import declared
from app.errors import ApiError
from app.llm.first_token import settle_first_token
from app.llm.vllm_errors import ConstraintError, NonFiniteError
from app.serving.events import events
from app.serving.operation import Operation

ENDPOINTS = {endpoint.name: endpoint for endpoint in declared()}


def test_only_nullable_fields_keep_their_null() -> None:
    body = {
        "choices": [{"message": {"content": None, "annotations": None}, "logprobs": None}],
        "usage": {"prompt_tokens_details": None, "total_tokens": 0},
        "tokens": [None, 1],
    }
    assert without_nulls(body) == {
        "choices": [{"message": {"content": None}, "logprobs": None}],
        "usage": {"total_tokens": 0},
        "tokens": [None, 1],
    }


def test_streamed_nulls_go_and_text_that_looks_like_one_stays() -> None:
    text = r'"content":"say ,\"token_ids\":null please"'
    event = (
        f'data: {{"delta":{{{text}}},"logprobs":null,"token_ids":null,"finish_reason":null}}\n\n'
    )
    expected = f'data: {{"delta":{{{text}}},"logprobs":null,"finish_reason":null}}\n\n'
    assert without_streamed_nulls(event) == expected


class Answer(BaseModel):
    """A response of vLLM's."""

    input: dict[str, Any] = {}
    status: Literal["completed", "incomplete"] = "completed"


class Completed(BaseModel):
    """An event of vLLM's Responses."""

    type: str = "response.completed"
    response: Answer


async def stream_of(*items: Any) -> AsyncGenerator[Any, None]:
    for item in items:
        if isinstance(item, Exception):
            raise item
        yield item


def sent(operation: str, *items: Any) -> list[str]:
    async def collect() -> list[str]:
        error = ApiError(500, "sorry")
        return [
            text
            async for text in events(
                stream_of(*items), ENDPOINTS[operation].answers, lambda _: error
            )
        ]

    return asyncio.run(collect())


def test_only_openais_chunks_lose_their_nulls() -> None:
    event = 'data: {"type":"x","stop_sequence":null}\n\n'
    assert sent("messages", event) == [event]
    assert sent("chat", event) == ['data: {"type":"x"}\n\n']


def test_a_response_that_was_cut_ends_incomplete() -> None:
    (cut,) = sent("responses", Completed(response=Answer(status="incomplete")))
    name, data = cut.strip().split("\n")
    assert name == "event: response.incomplete"
    assert json.loads(data.removeprefix("data: "))["type"] == "response.incomplete"
    (whole,) = sent("responses", Completed(response=Answer()))
    assert whole.startswith("event: response.completed\n")


@pytest.mark.parametrize(
    ("operation", "item", "expected"),
    [
        ("chat", 'data: {"error":{"message":"boo","type":"x","code":500}}\n\n', {"error"}),
        ("chat", ValueError("boo"), {"error"}),
        ("messages", 'event: error\ndata: {"boo":1}\n\n', {"type", "error"}),
        (
            "responses",
            ValueError("boo"),
            {"type", "code", "message", "param", "sequence_number", "error"},
        ),
    ],
)
def test_an_error_inside_a_stream_wears_its_apis_envelope(
    operation: str, item: Any, expected: set[str]
) -> None:
    last = sent(operation, "data: 1\n\n", item)[-1]
    assert "boo" not in last
    assert set(json.loads(last[last.index("data:") + 5 :])) == expected


def operation(call: Callable[[Any], Awaitable[Any]]) -> Operation:
    return Operation(ENDPOINTS["messages"], Answer.model_validate, call, lambda payload: None)


def generating(*items: Any, answer: Any = None) -> Callable[[Any], Awaitable[Any]]:
    """A call that generates tokens until one of the items is an error, and then has an answer."""

    async def call(request: Any) -> Any:
        async for _ in settle_first_token(stream_of(*items)):
            pass
        return Answer.model_validate(answer)

    return call


async def not_finite_streamed(request: Any) -> Any:
    """As vLLM's serving classes stream it: an error that says nothing."""

    async def stream() -> AsyncGenerator[str, None]:
        try:
            async for _ in settle_first_token(stream_of("token", NonFiniteError())):
                yield "data: 1\n\n"
        except NonFiniteError:
            yield 'data: {"error":{"message":"Internal server error","type":"x","code":500}}\n\n'

    return stream()


@pytest.mark.parametrize("tokens", [[], ["token"]])
def test_output_that_is_not_finite_has_a_code(tokens: list[str]) -> None:
    with pytest.raises(ApiError) as caught:
        asyncio.run(operation(generating(*tokens, NonFiniteError()))({"input": {}}))
    assert (caught.value.status, caught.value.code) == (500, "non_finite_output")
    assert caught.value.headers == {"x-should-retry": "false"}


def test_output_that_is_not_finite_has_it_in_a_stream_too() -> None:
    async def last() -> str:
        streaming = Operation(
            ENDPOINTS["chat"], Answer.model_validate, not_finite_streamed, lambda payload: None
        )
        reply = await streaming({"input": {}})
        assert not isinstance(reply.answer, dict)
        return [event async for event in reply.answer][-1]

    error = json.loads(asyncio.run(last()).removeprefix("data:"))["error"]
    assert (error["type"], error["code"]) == ("server_error", "non_finite_output")


BROKEN = generating("token", answer={"input": "no object"})
DEAD_END = generating("token", ConstraintError("a dead end"))
EARLY_ERROR = generating(ValueError("'input' is too long"))


async def refused(request: Any) -> Any:
    return ErrorResponse(error=ErrorInfo(message="no", type="x", param="input", code=400))


@pytest.mark.parametrize(
    ("payload", "call", "status", "param"),
    [
        ({"input": 5}, BROKEN, 400, "input"),  # the request
        ({"input": {}}, BROKEN, 500, None),  # the answer: ours, though it looks the same
        ({"input": {}}, EARLY_ERROR, 400, "input"),
        ({"input": {}, "response_format": {}}, DEAD_END, 400, "response_format"),
        ({"input": {}}, refused, 400, "input"),
    ],
)
def test_only_a_requests_own_mistakes_are_blamed_on_it(
    payload: dict[str, Any], call: Any, status: int, param: str | None
) -> None:
    with pytest.raises(ApiError) as caught:
        asyncio.run(operation(call)(payload))  # type: ignore[arg-type]
    assert (caught.value.status, caught.value.param) == (status, param)
