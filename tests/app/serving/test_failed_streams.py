"""Streams that end with an error after the first token, as the clients of each API read them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseFailedEvent

from app.endpoints import declared
from app.errors import ApiError
from tests.app.fake_engine import client
from tests.waiting import let_pass


def events_of(body: dict[str, Any], path: str, stops: Any, **headers: str) -> list[Any]:
    """The data of a stream's events; a text is no JSON. After three outputs of the engine, `stops`
    is awaited."""
    with client(answer="Hi there, friend") as gateway:
        engine = gateway.app.state.engine.llm  # type: ignore[attr-defined]
        outputs = engine._outputs

        async def broken(*request: Any) -> AsyncGenerator[Any]:
            sent = 0
            async for output in outputs(*request):
                yield output
                sent += 1
                if sent == 3:
                    await stops(engine)

        engine._outputs = broken
        asked = {"model": "fake", "stream": True, **body}
        response = gateway.post(path, json=asked, headers=headers)
    assert response.status_code == 200
    lines = response.text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(text) if text.startswith("{") else text for text in data]


async def breaks(engine: Any) -> None:
    raise RuntimeError("boom")


async def hangs(engine: Any) -> None:
    await let_pass(301)
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("stops", "code", "headers"),
    [
        pytest.param(breaks, "server_error", {}, id="an error"),
        pytest.param(hangs, "request_timeout", {"x-request-timeout": "300"}, id="a deadline"),
    ],
)
def test_a_response_that_fails_ends_as_failed(
    stops: Any, code: str, headers: dict[str, str]
) -> None:
    events = events_of({"input": "hi"}, "/v1/responses", stops, **headers)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, error, failed = events[0]["response"], events[-2], events[-1]
    assert (error["type"], error["code"]) == ("error", code)
    response = ResponseFailedEvent.model_validate(failed, strict=True).response
    assert (response.id, response.status) == (created["id"], "failed")
    assert response.error is not None
    assert response.error.message == error["message"]


def test_openais_client_raises_the_error_of_a_response() -> None:
    """Catches: an event that the client reads as any other, so that a cut answer looks whole."""
    with client(answer="Hi there, friend") as gateway:
        engine = gateway.app.state.engine.llm  # type: ignore[attr-defined]
        outputs = engine._outputs

        async def broken(*request: Any) -> AsyncGenerator[Any]:
            async for output in outputs(*request):
                yield output
                raise RuntimeError("boom")

        engine._outputs = broken
        http: Any = gateway
        api = openai.OpenAI(
            base_url="http://testserver/v1", api_key="x", http_client=http, max_retries=0
        )
        stream = api.responses.create(model="fake", input="hi", stream=True)
        assert next(stream).type == "response.created"
        with pytest.raises(openai.APIError, match="The server had an error") as caught:
            list(stream)
    assert caught.value.type == "server_error"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 16}),
    ],
)
def test_an_error_is_the_last_event(path: str, body: dict[str, Any]) -> None:
    """A client that skips what it does not know would take `[DONE]` for the end of the answer."""
    *chunks, last = events_of(body, path, breaks)
    assert chunks
    assert last["error"]["message"]
    assert not any("error" in chunk for chunk in chunks)


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "invalid_request_error"), (503, "overloaded_error")]
)
def test_an_error_of_messages_has_the_same_type_in_a_stream(status: int, kind: str) -> None:
    answers = next(endpoint.answers for endpoint in declared() if endpoint.name == "messages")
    error = ApiError(status, "It went wrong.")
    event = json.loads(answers.error_event(error).partition("data: ")[2])
    assert event == answers.error_body(error, None)
    assert event["error"]["type"] == kind
