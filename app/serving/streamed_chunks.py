"""Corrections of the chunks of vLLM's streams, which are ready-made texts of events."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from vllm.outputs import RequestOutput

from app.llm.token_origins import origins_of
from app.request_usage import current_usage

_CHUNK = 'data: {"id":'
_CACHED = '"cached_tokens":'


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
        if not self._waiting or not event.startswith(_CHUNK):
            return event
        chunk = json.loads(event.removeprefix("data: "))
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
        return _event_of(chunk)


class StreamedCalls:
    """The arguments of a stream's calls, and the finish reason that follows from them.

    `stop_tokens` are the request's `stop_token_ids`.
    """

    def __init__(self, stop_tokens: Collection[int] | None) -> None:
        self._stop_tokens = stop_tokens
        self._arguments: dict[int, dict[int, list[str]]] = {}  # by choice, then by call

    def corrected(self, event: str) -> str:
        """The event; `tool_calls` is `stop` where the request's stop cut the choice's last call."""
        if '"tool_calls"' not in event or not event.startswith(_CHUNK):
            return event
        chunk, changed = json.loads(event.removeprefix("data: ")), False
        for choice in chunk.get("choices") or ():
            calls = self._arguments.setdefault(choice["index"], {})
            for call in choice["delta"].get("tool_calls") or ():
                text = (call.get("function") or {}).get("arguments") or ""
                calls.setdefault(call["index"], []).append(text)
            stopped = is_stop(choice.get("stop_reason"), self._stop_tokens)
            called = calls and choice.get("finish_reason") == "tool_calls"
            if stopped and called and not is_object("".join(calls[max(calls)])):
                choice["finish_reason"], changed = "stop", True
        return _event_of(chunk) if changed else event


def with_cached_tokens(event: str) -> str:
    """The event; if it has a stream's usage, with the cached tokens of all prompts."""
    if _CACHED not in event or not event.startswith(_CHUNK):
        return event
    ours = current_usage()
    cached = None if ours is None else ours.cached_tokens
    if cached is None:
        return event
    chunk = json.loads(event.removeprefix("data: "))
    details = (chunk.get("usage") or {}).get("prompt_tokens_details") or {}
    if details.get("cached_tokens") is None:
        return event
    details["cached_tokens"] = cached
    return _event_of(chunk)


def with_first_cached_tokens(event: str, output: RequestOutput) -> str:
    """The event; if it has a chunk's usage, with the cached tokens of the output's prompt."""
    if not event.startswith(_CHUNK):
        return event
    chunk = json.loads(event.removeprefix("data: "))
    if chunk.get("usage"):
        chunk["usage"]["prompt_tokens_details"] = {
            "cached_tokens": output.num_cached_tokens,
            "created_cache_tokens": output.num_cache_creation_tokens,
        }
    return _event_of(chunk)


def is_object(text: str) -> bool:
    """Whether a text is a whole JSON object, as the arguments of a call have to be."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def is_stop(reason: str | int | None, stop_tokens: Collection[int] | None) -> bool:
    """Whether vLLM's `stop_reason` is a stop string or one of the request's stop tokens: the end of
    a turn may have a number, too."""
    return isinstance(reason, str) or reason in (stop_tokens or ())


def _event_of(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
