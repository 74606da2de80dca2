"""Tools of a request: which kinds an API has, and whether the model's calls can be read.

This server runs no tools itself. A tool that only the provider of an API could run (a web search,
an interpreter of code) is refused by name, or dropped where the operator says so. No vllm import.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from app.validation.field_checks import invalid

Unknown = Literal["refuse", "ignore"]

Payload = dict[str, Any]
# Types of Responses' `tool_choice` that choose among the tools of the request.
_NAMED = ("function", "custom", "tool", "auto", "any", "none", "allowed_tools")


@dataclass(frozen=True)
class ToolRules:
    """What the tools of one API may be.

    `types` are those of tools that the client runs. `check` looks at the tools' shape.
    `needs_parser` is whether the model may call them only where somebody reads its calls. With
    `any_choice`, vLLM's model takes a `tool_choice` of any type, which may name a tool that does
    not exist here.
    """

    types: tuple[str, ...]
    check: Callable[[Payload], None] = lambda payload: None
    needs_parser: bool = True
    any_choice: bool = False
    # The member of a `tool_choice` of type `allowed_tools` that holds its mode and tools; empty if
    # the choice holds them itself, and None where the API has no such choice.
    allowed_in: str | None = None


def take_unknown_tools(payload: Payload, rules: ToolRules, unknown: Unknown) -> None:
    """Refuse tools that do not exist here, or drop them from the payload."""
    tools, types = payload.get("tools"), rules.types
    if not isinstance(tools, list):
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
    if rules.any_choice:
        _check_choice(payload, unknown)


def _type_of(tool: Any) -> str | None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return kind if isinstance(kind, str) else None


def _check_choice(payload: Payload, unknown: Unknown) -> None:
    """Check a `tool_choice` that names a tool by its type alone."""
    kind = _type_of(payload.get("tool_choice"))
    if kind is None or kind in _NAMED:
        return
    if unknown == "ignore":
        del payload["tool_choice"]
        return
    raise invalid(
        "tool_choice.type",
        f"'tool_choice' of type '{kind}' is not supported: choose a function, or 'auto', "
        "'required' or 'none'.",
    )


def take_allowed_tools(payload: Payload, rules: ToolRules, unknown: Unknown) -> None:
    """Leave the tools that a `tool_choice` of type `allowed_tools` names, and its mode as the
    choice. Raises ApiError for a name that no tool has."""
    choice = payload.get("tool_choice")
    if rules.allowed_in is None or _type_of(choice) != "allowed_tools":
        return
    where, given = "tool_choice", choice
    if rules.allowed_in:
        where = f"{where}.{rules.allowed_in}"
        given = choice.get(rules.allowed_in) if isinstance(choice, dict) else None
    if not isinstance(given, dict):
        raise invalid(where, f"'{where}' must be an object.")
    mode, names = given.get("mode"), given.get("tools")
    if mode not in ("auto", "required"):
        raise invalid(f"{where}.mode", f"'{where}.mode' must be 'auto' or 'required'.")
    if not isinstance(names, list) or not names:
        raise invalid(f"{where}.tools", f"'{where}.tools' must be a list of at least one tool.")
    tools = payload.get("tools")
    tools = tools if isinstance(tools, list) else []
    identities = {_identity(tool) for tool in tools}
    allowed = set()
    for index, named in enumerate(names):
        identity = _identity(named)
        if identity is not None and identity in identities:
            allowed.add(identity)
        elif unknown == "refuse" or _type_of(named) in rules.types:
            place = f"{where}.tools[{index}]"
            raise invalid(place, f"'{place}' must name one of 'tools', by its type and name.")
    payload["tools"] = [tool for tool in tools if _identity(tool) in allowed]
    payload["tool_choice"] = mode
    if not allowed:
        del payload["tools"], payload["tool_choice"]


def _identity(tool: Any) -> tuple[str, str] | None:
    """Type and name of a tool, as an API lists it or a choice names it; None without them."""
    function = tool.get("function") if isinstance(tool, dict) else None
    holder = function if isinstance(function, dict) else tool
    name, kind = holder.get("name") if isinstance(holder, dict) else None, _type_of(tool)
    return (kind, name) if kind is not None and isinstance(name, str) else None


def check_unread_calls(payload: Payload, rules: ToolRules) -> None:
    """Refuse tools that the model may call: without a parser, calls would be plain text."""
    if not (rules.needs_parser and payload.get("tools") and isinstance(payload["tools"], list)):
        return
    choice = payload.get("tool_choice", "auto")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind != "none":
        raise invalid(
            "tool_choice",
            "This server does not read the model's tool calls: it was started without "
            "--tool-call-parser. Send 'tool_choice' \"none\", or no tools.",
        )


def check_anthropic_choice(payload: Payload) -> None:
    """Refuse a forced call, in Anthropic's form, of a tool that the request does not have."""
    choice, tools = payload.get("tool_choice"), payload.get("tools")
    kind = _type_of(choice)
    if kind not in ("any", "tool"):
        return
    if not tools:
        raise invalid("tool_choice", f"'tool_choice' of type '{kind}' needs 'tools'.")
    name = choice.get("name") if isinstance(choice, dict) else None
    if kind == "tool" and isinstance(name, str) and isinstance(tools, list):
        names = [tool.get("name") for tool in tools if isinstance(tool, dict)]
        if name not in names:
            where = "tool_choice.name"
            raise invalid(where, f"'{where}' must be the name of one of 'tools'.")
