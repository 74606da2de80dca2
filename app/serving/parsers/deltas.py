"""Adds up the deltas of a stream, as a client does."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.entrypoints.generate.base.protocol import DeltaMessage, FunctionCall


def calls_of(deltas: Iterable[DeltaMessage]) -> list[FunctionCall]:
    """The tool calls of a stream, in order of their index."""
    calls: dict[int, FunctionCall] = {}
    for delta in deltas:
        for part in delta.tool_calls:
            function = part.function
            if function is None:
                continue
            if part.index not in calls:
                calls[part.index] = FunctionCall(
                    id=part.id, name=function.name or "", arguments=function.arguments or ""
                )
            else:
                calls[part.index].arguments += function.arguments or ""
    return [call for _, call in sorted(calls.items())]
