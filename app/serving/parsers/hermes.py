"""Parser of tool calls between `<tool_call>` tags (Hermes, Qwen 3), the same for streams."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser
from vllm.tool_parsers.utils import partial_tag_overlap

from app.serving.parsers.whole_as_stream import WholeAsStream, forces_call

_ARGUMENTS = re.compile(r'"arguments"\s*:\s*')
_DECODER = json.JSONDecoder()


class HermesToolParser(WholeAsStream, Hermes2ProToolParser):
    """vLLM's Hermes parser (vllm/tool_parsers/hermes_tool_parser.py), for streams and whole answers
    alike.

    vLLM spells arguments of a whole answer differently from a stream's, and one call that the token
    limit cut turns all calls into raw markup. Here tags around something that is no call, and the
    start of what might have become a tag, are content; vLLM's stream drops them.
    """

    _sent_content_idx: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._current_text = ""

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        """The delta of what `current_text` holds and has not been sent."""
        self._current_text = current_text
        delta: DeltaMessage | None = super().extract_tool_calls_streaming(
            previous_text,
            current_text,
            delta_text,
            previous_token_ids,
            current_token_ids,
            delta_token_ids,
            request,
        )
        return delta

    def held_back_content(self, request: Any) -> str:
        """Content that was held back as the possible start of a tag, once the answer has ended."""
        content = self._content(self._current_text, finished=not forces_call(request))
        held, self._sent_content_idx = content[self._sent_content_idx :], len(content)
        return held

    def _extract_tool_call_jsons(self, text: str) -> list[tuple[str, bool]]:
        """Bodies of calls, and whether they are complete. Text between tags that is no call is left
        out; vLLM finds no call behind it."""
        bodies: list[tuple[str, bool]] = super()._extract_tool_call_jsons(text)
        return [body for body in bodies if self._extract_tool_name(body[0])]

    def _extract_content(self, current_text: str) -> str | None:
        """Content that has not been sent yet."""
        content = self._content(current_text, finished=False)
        unsent, self._sent_content_idx = content[self._sent_content_idx :], len(content)
        return unsent or None

    def _content(self, text: str, *, finished: bool) -> str:
        """The text in front of the first call, unless it is white space alone. While more may
        come, it only ever grows at its end."""
        content, position = "", 0
        while (start := text.find(self.tool_call_start_token, position)) >= 0:
            if (between := text[position:start]).strip():
                content += between
            body = start + len(self.tool_call_start_token)
            end = text.find(self.tool_call_end_token, body)
            if end < 0 or self._extract_tool_name(text[body:end]):
                return content
            position = end + len(self.tool_call_end_token)
            content += text[start:position]
        rest = text[position:]
        if not finished:
            rest = rest[: len(rest) - partial_tag_overlap(rest, self.tool_call_start_token)]
        return content + rest if finished or rest.strip() else content

    @staticmethod
    def _extract_tool_args(tc_json: str, is_complete: bool) -> str | None:
        """The arguments as the model spells them, as far as they have come."""
        match = _ARGUMENTS.search(tc_json)
        if match is None:
            return "{}" if is_complete else None
        try:
            _, end = _DECODER.raw_decode(tc_json, match.end())
        except ValueError:
            return tc_json[match.end() :]
        return tc_json[match.end() : end]
