"""Cached tokens in the usage of an answer, whole or streamed: those of all its prompts."""

from __future__ import annotations

from typing import Any

from vllm.outputs import RequestOutput

from app.request_usage import current_usage
from app.serving.classes.streamed_chunks import chunk_of, event_of, is_chunk

_CACHED = '"cached_tokens":'


def correct_cached_tokens(usage: Any) -> None:
    """Say in a whole answer's usage how many tokens of all its prompts were cached: vLLM takes one
    prompt's, and of several choices one that found what another had just left."""
    ours = current_usage()
    cached = None if ours is None else ours.cached_tokens
    details = usage.prompt_tokens_details
    if cached is not None and details is not None and details.cached_tokens is not None:
        details.cached_tokens = cached


def with_cached_tokens(event: str) -> str:
    """The event; if it has a stream's usage, with the cached tokens of all prompts."""
    if _CACHED not in event or not is_chunk(event):
        return event
    ours = current_usage()
    cached = None if ours is None else ours.cached_tokens
    if cached is None:
        return event
    chunk = chunk_of(event)
    details = (chunk.get("usage") or {}).get("prompt_tokens_details") or {}
    if details.get("cached_tokens") is None:
        return event
    details["cached_tokens"] = cached
    return event_of(chunk)


def with_first_cached_tokens(event: str, output: RequestOutput) -> str:
    """The event; if it has a chunk's usage, with the cached tokens of the output's prompt."""
    if not is_chunk(event):
        return event
    chunk = chunk_of(event)
    if chunk.get("usage"):
        chunk["usage"]["prompt_tokens_details"] = {
            "cached_tokens": output.num_cached_tokens,
            "created_cache_tokens": output.num_cache_creation_tokens,
        }
    return event_of(chunk)
