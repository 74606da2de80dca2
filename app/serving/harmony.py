"""Answers of the Harmony format (gpt-oss), which vLLM reads by tokens: stop strings, and answers
that were begun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage, FunctionCall
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
from vllm.parser.harmony import HarmonyParser, _SegmentType

from app.llm.stop_strings import Beginnings

_FIELDS = {_SegmentType.REASONING: "reasoning", _SegmentType.CONTENT: "content"}


@dataclass
class _Text:
    """What a stream has of one field so far."""

    beginnings: Beginnings
    text: str = ""
    sent: int = 0  # characters


def continued(prompt: Sequence[int]) -> list[int]:
    """A prompt whose last message is open, and goes on. Raises ValueError if it has no message to
    go on with."""
    end = _tokens("<|end|><|start|>assistant")
    if list(prompt[-len(end) :]) != end:
        raise ValueError("no message ends the prompt")
    return list(prompt[: -len(end)])


def _tokens(text: str) -> list[int]:
    return list(get_encoding().encode(text, allowed_special="all"))


class GatewayHarmonyParser(HarmonyParser):
    """HarmonyParser (vllm/parser/harmony.py) without stop strings in what it finds, and for answers
    that were begun in the prompt (`continued`).

    An answer ends at its stop string, which vLLM cuts off its text and leaves among its tokens,
    with the rest of the last one. Here it is cut off reasoning and content. Arguments of a call
    keep it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._last: str | None = None  # the field that the newest token belongs to
        self._texts: dict[str, _Text] = {}
        self._begun = False

    def set_prompt_token_ids(self, prompt_token_ids: Sequence[int]) -> None:
        """Begin within the answer's text if the prompt does: other answers begin with a channel."""
        super().set_prompt_token_ids(prompt_token_ids)
        self._begin(prompt_token_ids)

    def _begin(self, prompt: Sequence[int]) -> None:
        if self._begun or not prompt:
            return
        self._begun = True
        header = _tokens("<|start|>assistant")
        if list(prompt[-len(header) :]) != header:
            for token in _tokens("<|channel|>final<|message|>"):
                self._harmony_parser.process(token)

    def process_chunk(self, token_ids: Sequence[int]) -> Any:
        """The segments of these tokens, as vLLM's."""
        result = super().process_chunk(token_ids)
        for segment in result.segments:
            if segment.delta:
                kind = _SegmentType.from_channel_and_recipient(segment.channel, segment.recipient)
                self._last = _FIELDS.get(kind)
        return result

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
        if stops and self._last == "reasoning" and reasoning:
            reasoning = _cut(reasoning, stops, model_output_token_ids) or None
        elif stops and self._last == "content" and content:
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
        delta = delta or DeltaMessage()
        for field in _FIELDS.values():
            new = getattr(delta, field) or ""
            if new and field not in self._texts:
                self._texts[field] = _Text(Beginnings(stops))
            if (known := self._texts.get(field)) is None:
                continue
            known.text += new
            until = len(known.text)
            if field == self._last:
                if finished:
                    known.text = _cut(known.text, stops, delta_token_ids)
                    until = len(known.text)
                else:
                    until -= known.beginnings.held_back(known.text)
            setattr(delta, field, known.text[known.sent : until] or None)
            known.sent = max(known.sent, until)
        if not (delta.reasoning or delta.content or delta.tool_calls):
            return None
        return delta


def _stops(request: Any) -> list[str]:
    """The stop strings that are no part of the answer to a request."""
    if not request.stop or getattr(request, "include_stop_str_in_output", False):
        return []
    return [request.stop] if isinstance(request.stop, str) else list(request.stop)


def _cut(text: str, stops: Sequence[str], tokens: Sequence[int]) -> str:
    """`text` up to the stop string that its last token completes, if it does."""
    if not tokens:
        return text
    last = get_encoding().decode([tokens[-1]])
    ends = [
        place
        for stop in stops
        if (place := text.rfind(stop)) >= 0 and len(text) - place - len(stop) < len(last)
    ]
    return text[: min(ends, default=len(text))]
