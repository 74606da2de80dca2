"""The calls in the deltas of a stream: added up, as a client does, and one entry for each."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.entrypoints.generate.base.protocol import DeltaMessage, DeltaToolCall, FunctionCall


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


def joined(calls: Iterable[DeltaToolCall]) -> list[DeltaToolCall]:
    """The entries of one delta, joined to one for each call: clients drop others."""
    entries: dict[int, DeltaToolCall] = {}
    for call in calls:
        entry = entries.setdefault(call.index, call)
        if entry is call or call.function is None:
            continue
        if entry.function is None:
            entry.function = call.function
        elif call.function.arguments is not None:
            entry.function.arguments = (entry.function.arguments or "") + call.function.arguments
    return list(entries.values())
