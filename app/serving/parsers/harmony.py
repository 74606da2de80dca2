"""Answers of the Harmony format (gpt-oss), which vLLM reads by tokens: stop strings, and answers
that were begun in the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage, FunctionCall
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
from vllm.parser.harmony import HarmonyParser, _SegmentType

from app.llm.stop_strings import Beginnings

_FIELDS = {_SegmentType.REASONING: "reasoning", _SegmentType.CONTENT: "content"}
_START, _END = "<|start|>assistant", "<|end|>"
_FINAL = "<|channel|>final<|message|>"


def continued(prompt: Sequence[int]) -> list[int]:
    """A prompt whose last message, an answer of the assistant, is open and goes on. Raises
    ValueError if another message is the last one."""
    end = _tokens(_END + _START)
    opened = list(prompt[: -len(end)])
    if list(prompt[-len(end) :]) != end or not is_continued(opened):
        raise ValueError("the last message is no answer")
    return opened


def is_continued(prompt: Sequence[int]) -> bool:
    """Whether a prompt ends within an answer of the assistant."""
    header = _tokens(_START + _FINAL)
    starts = (i for i in range(len(prompt) - 1, -1, -1) if prompt[i] == header[0])
    last = next(starts, len(prompt))
    return list(prompt[last : last + len(header)]) == header


@cache
def _tokens(text: str) -> list[int]:
    return list(get_encoding().encode(text, allowed_special="all"))


class GatewayHarmonyParser(HarmonyParser):
    """HarmonyParser (vllm/parser/harmony.py) without stop strings and cut headers in what it finds,
    and for answers that were begun in the prompt.

    An answer ends at its stop string, which vLLM cuts off its text and leaves among its tokens,
    with the rest of the last one. Here it is cut off reasoning and content. Arguments of a call
    keep it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._knows_prompt = False
        self._open: str | None = None  # the field of the message that is being written
        self._held = ("", "")  # the field of a stream's text that is held back, and the text
        self._beginnings: Beginnings | None = None  # of the open message

    def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
        """Begin within an answer if the prompt ends in one; other answers begin with a channel."""
        super().set_prompt_token_ids(prompt_token_ids)
        self._begin(prompt_token_ids)

    def _begin(self, prompt: Sequence[int]) -> None:
        if self._knows_prompt or not prompt:
            return
        self._knows_prompt = True
        if is_continued(prompt):
            for token in _tokens(_FINAL):
                self._harmony_parser.process(token)

    def process_chunk(self, token_ids: Sequence[int]) -> Any:
        """The segments of these tokens, as vLLM's."""
        result = super().process_chunk(token_ids)
        for segment in result.segments:
            field = self._open
            if segment.completed_message is not None:
                field = None
            elif segment.delta:
                kind = _SegmentType.from_channel_and_recipient(segment.channel, segment.recipient)
                field = _FIELDS.get(kind)
            if field != self._open:
                self._open = field
                self._beginnings = None
        return result

    def flush(self) -> list[Any]:
        """The segments that the end of the answer completes; none of a message that was cut within
        its header, whose markup vLLM takes for text."""
        tokens = self._current_message_tokens
        in_header = self._harmony_parser.state.name == "HEADER" and (
            not tokens or get_encoding().is_special_token(tokens[0])
        )
        segments: list[Any] = super().flush()
        return [] if in_header else segments

    def parse(
        self,
        model_output: str,
        request: Any,
        enable_auto_tools: bool = False,
        model_output_token_ids: Sequence[int] = (),
    ) -> tuple[str | None, str | None, list[FunctionCall] | None]:
        """Reasoning, content and calls of a whole answer."""
        reasoning, content, calls = super().parse(
            model_output, request, enable_auto_tools, model_output_token_ids
        )
        stops = _stops(request)
        if self._open == "reasoning" and reasoning:
            reasoning = _cut(reasoning, stops, model_output_token_ids) or None
        elif self._open == "content" and content:
            content = _cut(content, stops, model_output_token_ids) or None
        return reasoning, content, calls

    def parse_delta(
        self,
        delta_text: str,
        delta_token_ids: list[int],
        request: Any,
        prompt_token_ids: list[int] | None = None,
        *,
        finished: bool,
    ) -> DeltaMessage | None:
        """The next delta of a stream. What may become a stop string is held back until more is
        known."""
        self._begin(prompt_token_ids or ())
        delta = super().parse_delta(
            delta_text, delta_token_ids, request, prompt_token_ids, finished=finished
        )
        stops = _stops(request)
        if not stops:
            return delta
        found: dict[str, Any] = {}
        if delta is not None and delta.tool_calls:
            found["tool_calls"] = delta.tool_calls
        held_field, held = self._held
        self._held = ("", "")
        for field in _FIELDS.values():
            new = getattr(delta, field, None) or ""
            text = held + new if field == held_field else new
            if field == self._open and finished:
                text = _cut(text, stops, delta_token_ids)
            elif field == self._open:
                self._beginnings = self._beginnings or Beginnings(stops)
                sent = len(text) - self._beginnings.held_back_after(new)
                self._held = (field, text[sent:])
                text = text[:sent]
            if text:
                found[field] = text
        return DeltaMessage(**found) if found else None


def _stops(request: Any) -> list[str]:
    """The stop strings that are no part of the answer to a request."""
    if not request.stop or getattr(request, "include_stop_str_in_output", False):
        return []
    return [request.stop] if isinstance(request.stop, str) else list(request.stop)


def _cut(text: str, stops: Sequence[str], tokens: Sequence[int]) -> str:
    """`text` up to the stop string that its last token completes first, if it does."""
    last = len(get_encoding().decode([tokens[-1]])) if tokens else 0
    found = []
    for stop in stops:
        place = text.find(stop, max(0, len(text) - last - len(stop) + 1))
        if place >= 0:
            found.append((place + len(stop), place))
    return text[: min(found)[1]] if found else text
