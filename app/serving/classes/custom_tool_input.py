"""The `input` of a custom tool's call in Responses, also of a call that was cut."""

from __future__ import annotations

import re

from vllm.entrypoints.openai.responses.utils import (
    decode_custom_tool_input,
    decode_custom_tool_input_prefix,
)
from vllm.tool_parsers.utils import CUSTOM_TOOL_INPUT_KEY

from app.serving.classes.call_arguments import is_object, partial_object

_HALF_A_PAIR = re.compile(r"[\ud800-\udfff]")


def custom_input(arguments: str) -> str:
    """The `input` of a custom tool's call; of arguments that end early, what has come of it, as
    streamed. vLLM would hand out their JSON."""
    members = None if is_object(arguments) else partial_object(arguments)
    if members is not None and members.keys() <= {CUSTOM_TOOL_INPUT_KEY}:
        return custom_input_so_far(arguments)
    return _HALF_A_PAIR.sub("\ufffd", decode_custom_tool_input(arguments))


def custom_input_so_far(arguments: str) -> str:
    """The `input` in the beginning of a call's arguments. Here and above a replacement character
    stands for half of a surrogate pair, which no answer can hold."""
    return _HALF_A_PAIR.sub("\ufffd", decode_custom_tool_input_prefix(arguments))
