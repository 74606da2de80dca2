"""Base of tool parsers that read a whole answer as a stream of one delta."""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.generate.base.protocol import (
    DeltaMessage,
    ExtractedToolCallInformation,
    ToolCall,
)

from app.serving.parsers.deltas import calls_of


class WholeAsStream:
    """Mixin in front of vLLM's tool parsers, which parse a whole answer with other code than a
    stream."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._again = lambda: type(self)(*args, **kwargs)

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """The calls of a whole answer, a cut one at its end included."""
        stream: Any = self._again()
        delta = stream.extract_tool_calls_streaming("", model_output, "", (), (), (), request)
        delta = delta or DeltaMessage()
        content = (delta.content or "") + stream.held_back_content(request)
        calls = [ToolCall(function=call) for call in calls_of([delta])]
        return ExtractedToolCallInformation(
            tools_called=bool(calls), tool_calls=calls, content=content or None
        )

    def held_back_content(self, request: Any) -> str:
        """Content that was held back as the possible start of a call, once the answer has ended.

        Where the request forces a call, the start of one belongs to that call and is no content.
        """
        raise NotImplementedError

    def get_remaining_unstreamed_args(self) -> str:
        """Nothing: vLLM would complete a call that was cut after its name with `{}`."""
        return ""


def forces_call(request: Any) -> bool:
    """Whether a request demands a call, of any tool or of one."""
    return request.tool_choice not in (None, "auto", "none")
