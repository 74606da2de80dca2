"""Cached tokens in the usage of answers with several prompts or choices, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.metrics.stats import PrefillStats

from app.request_usage import RequestUsage
from app.serving.classes import cached_tokens
from tests.app.serving.recording_core import MESSAGES, Connect, RecordingCore, gateway


def test_a_stream_s_usage_alone_is_counted_and_not_each_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: sums over all choices at each of their tokens."""
    usage = RequestUsage()
    usage.enter(
        SimpleNamespace(
            request_index=0, prompt_len=5, num_cached_tokens=16, stats=None,
            spec_decode_metrics=None, detokenizer=IncrementalDetokenizer(),
        ),
        (),
    )  # fmt: skip
    counts = []

    def current() -> RequestUsage:
        counts.append(1)
        return usage

    monkeypatch.setattr(cached_tokens, "current_usage", current)
    for event in ('data: {"id":"1","choices":[]}\n\n', "data: [DONE]\n\n"):
        assert cached_tokens.with_cached_tokens(event) == event
    assert counts == []
    last = 'data: {"id":"1","usage":{"prompt_tokens_details":{"cached_tokens":32}}}\n\n'
    assert cached_tokens.with_cached_tokens(last) == last.replace("32", "16")


class CachingCore(RecordingCore):
    """Each request has 16 more cached tokens than the one before it; the first has 16."""

    def answer(self, request: EngineCoreRequest) -> EngineCoreOutput:
        answer = super().answer(request)
        answer.prefill_stats = PrefillStats()
        answer.prefill_stats.num_cached_tokens = 16 * len(self.requests)
        answer.prefill_stats.num_cache_creation_tokens = 3
        return answer


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "body", "cached"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}, 16),
        ("/v1/chat/completions", {"messages": MESSAGES, "n": 3}, 16),
        ("/v1/completions", {"prompt": "hi", "n": 2}, 16),
        ("/v1/completions", {"prompt": ["hi", "ho", "hu"]}, 16 + 32 + 48),
        ("/v1/completions", {"prompt": ["hi", "ho"], "n": 2}, 16 + 48),
    ],
)
def test_cached_tokens_are_those_of_all_prompts_and_of_the_first_choice(
    connect: Connect, path: str, body: dict[str, Any], cached: int, stream: bool
) -> None:
    async def scenario() -> str:
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        async with gateway(connect(CachingCore())) as post:
            response = await post(path, "one", max_tokens=1, **body, **options)
            return str(response.text)

    text = asyncio.run(scenario())
    if stream:
        (text,) = [
            line.removeprefix("data: ") for line in text.splitlines() if '"cached_tokens"' in line
        ]
    assert json.loads(text)["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


def test_the_first_event_of_messages_counts_as_the_last_does(connect: Connect) -> None:
    async def scenario() -> str:
        async with gateway(connect(CachingCore())) as post:
            messages = [{"role": "user", "content": "hi " * 10}]
            body = {"model": "aerie-embedded", "messages": messages, "stream": True}
            return str((await post("/v1/messages", "one", max_tokens=1, **body)).text)

    lines = asyncio.run(scenario()).splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line[:5] == "data:"]
    by_type = {event["type"]: event for event in events}
    first, last = by_type["message_start"]["message"]["usage"], by_type["message_delta"]["usage"]
    assert first["cache_read_input_tokens"] == 16
    assert first == {**last, "output_tokens": 0}
