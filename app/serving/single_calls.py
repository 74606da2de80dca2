"""Conversations for chat templates that take one tool call a turn, such as those of Llama 3."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Message = dict[str, Any]

_NAME = "f"
TOOL: Message = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A function.",
        "parameters": {"type": "object", "properties": {}},
    },
}


def takes_single_calls(render: Callable[[list[Message]], object]) -> bool:
    """Whether `render` takes a turn with one call and raises for a turn with two."""
    return _takes(render, 1) and not _takes(render, 2)


def _takes(render: Callable[[list[Message]], object], calls: int) -> bool:
    names = [f"callid{number:03}" for number in range(calls)]  # the form of Mistral's, too
    function = {"name": _NAME, "arguments": "{}"}
    tool_calls = [{"id": name, "type": "function", "function": function} for name in names]
    results = [{"role": "tool", "tool_call_id": name, "content": "1"} for name in names]
    turn = {"role": "assistant", "content": "", "tool_calls": tool_calls}
    try:
        render([{"role": "user", "content": "Hello"}, turn, *results])
    except Exception:
        return False
    return True


def with_single_calls(messages: Iterable[Any]) -> list[Any]:
    """The messages, with a turn of several calls as one turn for each call, which the call's result
    follows. Results that belong to no call come behind them."""
    turns: list[list[Any]] = []  # a message, or a turn's call, and what follows it
    by_call: dict[Any, list[Any]] = {}  # of the turn that was split last
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        if role == "tool" and message.get("tool_call_id") in by_call:
            by_call[message["tool_call_id"]].append(message)
            continue
        if role != "tool":
            by_call = {}
        calls = list(message.get("tool_calls") or ()) if role == "assistant" else []
        if not calls:
            turns.append([message])
            continue
        for number, call in enumerate(calls):
            turn = message if number == 0 else {"role": "assistant", "content": None}
            turns.append([{**turn, "tool_calls": [call]}])
            by_call[call.get("id")] = turns[-1]
    return [message for turn in turns for message in turn]
