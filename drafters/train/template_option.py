"""`--chat-template` and `--chat-template-kwargs`: the chat template and its arguments, as those of
the server that is trained for."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

# What prompts say themselves, or whoever renders them.
_RESERVED = {
    *("add_generation_prompt", "continue_final_message", "conversation", "messages", "tokenize"),
    "tools",
}


def add_template_option(group: argparse._ActionsContainer) -> None:
    """Add the options to a parser or to a group of its options."""
    group.add_argument(
        "--chat-template", type=template_text, metavar="FILE",
        help="chat template: that of `aerie serve --chat-template` [the target's]",
    )  # fmt: skip
    group.add_argument(
        "--chat-template-kwargs", type=template_kwargs, default={}, metavar="JSON",
        help='arguments of the chat template, such as {"enable_thinking": false}: those of '
        "`aerie serve --default-chat-template-kwargs` [none]",
    )  # fmt: skip


def set_template(tokenizer: Any, args: argparse.Namespace) -> None:
    """Give a tokenizer the template of --chat-template, if there is one."""
    if args.chat_template is not None:
        tokenizer.chat_template = args.chat_template


def template_text(file: str) -> str:
    """The text of a template's file. Raises argparse.ArgumentTypeError."""
    try:
        return Path(file).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"cannot be read: {error}") from None


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
