"""`--chat-template-kwargs`: arguments of the chat template, as those of the server that is trained
for."""

from __future__ import annotations

import argparse
import json
from typing import Any

# What prompts say themselves, or whoever renders them.
_RESERVED = {
    *("add_generation_prompt", "continue_final_message", "conversation", "messages", "tokenize"),
    "tools",
}


def add_template_option(group: argparse._ActionsContainer) -> None:
    """Add the option to a parser or to a group of its options."""
    group.add_argument(
        "--chat-template-kwargs", type=template_kwargs, default={}, metavar="JSON",
        help='arguments of the chat template, such as {"enable_thinking": false}: those of '
        "`aerie serve --default-chat-template-kwargs` [none]",
    )  # fmt: skip


def template_kwargs(text: str) -> dict[str, Any]:
    """The option's value, checked. Raises argparse.ArgumentTypeError."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    if names := sorted(_RESERVED & value.keys()):
        raise argparse.ArgumentTypeError(f"{names[0]} is no argument of a template's own")
    return value
