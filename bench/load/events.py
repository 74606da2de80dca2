"""Parse records to outcomes: times of server-sent events, and the server's own token counts.

Tokens are those of `usage`, never chunks: with speculation a chunk holds several tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.load.client import Record


@dataclass(frozen=True, slots=True)
class Outcome:
    """The times of one request, in seconds of time.perf_counter(), and its tokens."""

    sent: float
    first: float  # when the first text (or tool call) came
    last: float  # when the last event of the answer came
    chunks: tuple[float, ...]  # when each event with text came
    events: tuple[float, ...]  # when each event of the answer came, with text or without
    prompt_tokens: int
    tokens: int  # tokens of the answer, by the server's count
    failure: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first text."""
        return self.first - self.sent

    @property
    def e2e(self) -> float:
        """Seconds to the end of the answer."""
        return self.last - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between successive chunks with text."""
        return _between(self.chunks)

    @property
    def event_gaps(self) -> list[float]:
        """Seconds between successive events: what `vllm bench serve` calls ITL."""
        return _between(self.events)


@dataclass(frozen=True, slots=True)
class AnswerMessage:
    """What an answer says: its text, its tool calls as (name, arguments), and why it ended."""

    text: str
    calls: tuple[tuple[str, str], ...]
    finish_reason: str


def events(reads: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """(time, data) of each server-sent event, at the time of the read that completed it."""
    rest = b""
    for time, data in reads:
        *whole, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            lines = [line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:  # else a comment: keep-alive
                yield time, b"\n".join(lines)


def outcome(record: Record) -> Outcome:
    """Parse one record. A stream without text, end or usage has a `failure` that says so."""
    chunks: list[float] = []
    answering: list[float] = []
    last, usage, done, failure = record.sent, None, False, record.failure
    if not failure:
        for time, data in events(record.reads):
            if data == b"[DONE]":
                done = True
                continue
            try:
                event = json.loads(data)
            except ValueError:
                failure = f"no JSON in an event: {data[:100]!r}"
                break
            if "error" in event:
                failure = f"error in the stream: {json.dumps(event['error'])[:300]}"
                break
            usage = event.get("usage") or usage
            choices = event.get("choices") or ()
            if choices:
                last = time
                answering.append(time)
            chunks += [time for choice in choices if _has_text(choice)]
    if not failure:
        failure = _missing(done, usage, bool(chunks))
    used = usage or {}
    return Outcome(
        sent=record.sent,
        first=chunks[0] if chunks else last,
        last=last,
        chunks=tuple(chunks),
        events=tuple(answering),
        prompt_tokens=int(used.get("prompt_tokens") or 0),
        tokens=int(used.get("completion_tokens") or 0),
        failure=failure,
    )


def answer_message(record: Record) -> AnswerMessage:
    """What the first choice of a record's answer says. The record must be that of an `outcome`
    without failure."""
    text, finish_reason = "", ""
    names, arguments = dict[int, str](), dict[int, str]()
    for _, data in events(record.reads):
        choices = () if data == b"[DONE]" else json.loads(data).get("choices") or ()
        for choice in choices[:1]:
            delta = choice.get("delta") or {}
            text += choice.get("text") or delta.get("content") or ""
            finish_reason = choice.get("finish_reason") or finish_reason
            for call in delta.get("tool_calls") or ():
                index, function = call.get("index", 0), call.get("function") or {}
                names[index] = names.get(index, "") + (function.get("name") or "")
                arguments[index] = arguments.get(index, "") + (function.get("arguments") or "")
    calls = tuple((names[index], arguments[index]) for index in sorted(names))
    return AnswerMessage(text, calls, finish_reason)


def _between(times: Sequence[float]) -> list[float]:
    return [b - a for a, b in pairwise(times)]


def _missing(done: bool, usage: Any, text: bool) -> str:
    if not done:
        return "the stream ended without [DONE]"
    if not usage:
        return "the server sent no usage (stream_options.include_usage)"
    # Special tokens have no text: an answer of these alone is not empty.
    return "" if text or usage.get("completion_tokens") else "an empty answer"


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    names = ("content", "reasoning_content", "reasoning", "tool_calls")
    return bool(choice.get("text") or any(delta.get(name) for name in names))
