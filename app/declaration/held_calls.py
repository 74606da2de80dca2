"""Refuses what a request demands of tool calls and no grammar would hold. No vllm import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.validation.constraints import has_strict_tool, place_of_format
from app.validation.field_checks import invalid


@dataclass(frozen=True)
class CallGrammar:
    """What the grammar of a tool parser of vLLM holds."""

    parser: str = ""
    forces: bool = True  # a call that `tool_choice` demands is made
    beside_formats: bool = True  # an answer may be a call where a format holds the text
    formats_need_strict: bool = False  # the same, but only if one of the tools is strict
    in_responses: bool = True  # all of this in Responses, too; else in chats and Messages alone

    def check(self, payload: Mapping[str, Any], *, is_response: bool) -> None:
        """Refuse a forced call, or a format beside tools that may be called, which this grammar
        does not hold: the answer would be without the call, or without any. Raises ApiError."""
        held = self.in_responses or not is_response
        choice = payload.get("tool_choice", "auto")
        kind = choice.get("type") if isinstance(choice, dict) else choice
        if not payload.get("tools") or kind == "none":
            return
        if kind not in (None, "auto"):
            if not (held and self.forces):
                raise invalid(
                    "tool_choice",
                    f"This server's tool parser '{self.parser}' cannot force a call here: send "
                    '\'tool_choice\' "auto" or "none".',
                    "unsupported_parameter",
                )
        elif not (held and self.beside_formats) and (place := place_of_format(payload)):
            raise invalid(
                place,
                f"With this server's tool parser '{self.parser}' no tool can be called beside "
                f"'{place}': send no tools, 'tool_choice' \"none\", or no format.",
                "unsupported_parameter",
            )
        elif (
            self.formats_need_strict
            and not has_strict_tool(payload)
            and (place := place_of_format(payload))
        ):
            raise invalid(
                place,
                "With this server's --tool-strict-level 'auto' no tool can be called beside "
                f"'{place}' unless one of the tools is 'strict': send a strict one, no tools, "
                "'tool_choice' \"none\", or no format.",
                "unsupported_parameter",
            )
