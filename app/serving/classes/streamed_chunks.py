"""Corrections of the chunks of vLLM's streams, which are ready-made texts of events."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from app.llm.token_origins import origins_of
from app.serving.classes.call_arguments import is_object, is_stop

_CHUNK = 'data: {"id":'
_CALLS = '"tool_calls":'
_TEXT = re.compile('"(?:reasoning|content)":"[^"]')
_CHUNK_MEMBERS = ("id", "object", "created", "model")


def is_chunk(event: str) -> bool:
    """Whether the text of an event holds a chunk: neither an error nor a stream's end."""
    return event.startswith(_CHUNK)


def chunk_of(event: str) -> dict[str, Any]:
    """The JSON of an event's chunk."""
    chunk: dict[str, Any] = json.loads(event.removeprefix("data: "))
    return chunk


def event_of(chunk: dict[str, Any]) -> str:
    """The text of an event that holds the chunk."""
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


def split(event: str) -> tuple[str, ...]:
    """The event; if its chunk has text and calls, two events, the text first: clients that look for
    text alone would lose the calls."""
    if _CALLS not in event or _TEXT.search(event) is None or not is_chunk(event):
        return (event,)
    chunk = chunk_of(event)
    text: list[dict[str, Any]] = []
    for choice in chunk["choices"]:
        delta = choice["delta"]
        texts = {name: delta.pop(name, None) for name in ("reasoning", "content")}
        moved = {name: value for name, value in texts.items() if value}
        text.append(
            {"index": choice["index"], "delta": moved, "logprobs": None, "finish_reason": None}
        )
    head = {name: chunk[name] for name in _CHUNK_MEMBERS if name in chunk}
    return event_of({**head, "choices": text}), event_of(chunk)


class StreamedOrigins:
    """Holds token origins, by choice, until the next chunk of a stream takes them.

    vLLM makes no chunk of an output in which a parser finds nothing to send: the origins of its
    tokens wait for the choice's next chunk. There is one at its end in any case.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, list[Any]] = {}

    def add(self, index: int, choice: Any) -> None:
        """Hold the origins in a choice's output, if the request asked for them."""
        if (told := origins_of(choice)) is not None:
            self._waiting.setdefault(index, []).append(told)

    def told_with(self, event: str) -> str:
        """The event, with the origins that wait for its choices.

        A chat's first chunk, which has the role and no text, gets none.
        """
        if not self._waiting or not is_chunk(event):
            return event
        chunk = chunk_of(event)
        choices = chunk.get("choices") or ()
        if not choices or "role" in choices[0].get("delta", {}):
            return event
        for choice in choices:
            waiting = self._waiting.pop(choice["index"], ())
            told = {
                name: [entry for part in waiting for entry in part[name]]
                for name in ("tokens", "steps")
            }
            if told["tokens"] or told["steps"]:
                choice["speculation"] = told
        return event_of(chunk)


class StreamedCalls:
    """The arguments of a stream's calls, and the finish reason that follows from them.

    `stop_tokens` are the request's `stop_token_ids`.
    """

    def __init__(self, stop_tokens: Collection[int] | None) -> None:
        self._stop_tokens = stop_tokens
        self._arguments: dict[int, dict[int, list[str]]] = {}  # by choice, then by call

    def corrected(self, event: str) -> str:
        """The event; `tool_calls` is `stop` where the request's stop cut the choice's last call."""
        if '"tool_calls"' not in event or not is_chunk(event):
            return event
        chunk, changed = chunk_of(event), False
        for choice in chunk.get("choices") or ():
            calls = self._arguments.setdefault(choice["index"], {})
            for call in choice["delta"].get("tool_calls") or ():
                text = (call.get("function") or {}).get("arguments") or ""
                calls.setdefault(call["index"], []).append(text)
            stopped = is_stop(choice.get("stop_reason"), self._stop_tokens)
            called = calls and choice.get("finish_reason") == "tool_calls"
            if stopped and called and not is_object("".join(calls[max(calls)])):
                choice["finish_reason"], changed = "stop", True
        return event_of(chunk) if changed else event
