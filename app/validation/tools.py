"""Tools of a request in every dialect: which kinds there are, and whether calls can be read.

This server runs no tools itself. A tool that only the provider of an API could run (a web search,
an interpreter of code) is refused by name, or dropped where the operator says so. No vllm import.
"""

from __future__ import annotations

from typing import Any, Literal

from app.validation.field_checks import invalid

Unknown = Literal["refuse", "ignore"]

# Dialect -> types of tools that the client runs; Anthropic's has none, or says "custom".
_TYPES: dict[str, tuple[str, ...]] = {
    "chat": ("function",),
    "tokenize": ("function",),
    "responses": ("function", "custom", "namespace"),
    "messages": ("custom",),
    "count_tokens": ("custom",),
}
_NAMED = ("function", "custom", "tool", "auto", "any", "none")


def take_unknown_tools(payload: dict[str, Any], dialect: str, unknown: Unknown) -> None:
    """Refuse tools that do not exist here, or drop them from the payload."""
    tools, types = payload.get("tools"), _TYPES.get(dialect)
    if types is None or not isinstance(tools, list):
        return
    known = []
    for index, tool in enumerate(tools):
        kind = _type_of(tool)
        if kind is None or kind in types:
            known.append(tool)
        elif unknown == "refuse":
            name = tool.get("name")
            named = f" ('{name}')" if isinstance(name, str) and name != kind else ""
            raise invalid(
                f"tools[{index}].type",
                f"This server has no tool of type '{kind}'{named}: 'tools[{index}].type' must be "
                f"{' or '.join(repr(each) for each in types)}.",
            )
    if len(known) < len(tools):
        payload["tools"] = known
        if not known:
            del payload["tools"]
            payload.pop("tool_choice", None)
    _check_choice(payload, dialect, unknown)


def _type_of(tool: Any) -> str | None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind if isinstance(kind, str) else None


def _check_choice(payload: dict[str, Any], dialect: str, unknown: Unknown) -> None:
    """A choice of Responses may name a tool by its type alone; vLLM's model takes any type."""
    kind = _type_of(payload.get("tool_choice"))
    if dialect != "responses" or kind is None or kind in _NAMED:
        return
    if unknown == "ignore":
        del payload["tool_choice"]
        return
    raise invalid(
        "tool_choice.type",
        f"'tool_choice' of type '{kind}' is not supported: choose a function, or 'auto', "
        "'required' or 'none'.",
    )


def check_calls_are_read(payload: dict[str, Any], dialect: str) -> None:
    """Without a parser a model's calls are text that nobody reads: refuse tools that it may call.
    Counting a prompt's tokens needs none."""
    if not payload.get("tools") or not isinstance(payload["tools"], list):
        return
    if dialect == "count_tokens":
        payload["tool_choice"] = {"type": "none"}
    elif dialect in ("chat", "responses", "messages"):
        choice = payload.get("tool_choice", "auto")
        kind = choice.get("type") if isinstance(choice, dict) else choice
        if kind != "none":
            raise invalid(
                "tool_choice",
                "This server does not read the model's tool calls: it was started without "
                "--tool-call-parser. Send 'tool_choice' \"none\", or no tools.",
            )
