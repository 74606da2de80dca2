"""Log probabilities of a response's content: not of its reasoning, nor of its tool calls.

vLLM puts those of a whole output on its content. In a stream it drops those of each output that
has no text for the content: of the first tokens of a character, and of what a tool parser holds
back. Here a position counts if its text is part of the content.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from openai.types.responses import ResponseOutputText, ResponseTextDeltaEvent
from openai.types.responses.response_output_text import Logprob
from vllm.entrypoints.openai.responses.streaming_events import _to_stream_logprobs

from app.llm.answer_logprobs import Alternatives


class _Position(NamedTuple):
    """One token's log probabilities, and where its text is in the output."""

    start: int
    end: int
    logprob: Logprob


class ContentLog:
    """The text of an output, and which of its positions belong to content.

    Reasoning, content and calls are told in the order of the text, which has markup between them.
    """

    def __init__(self) -> None:
        self._text = ""
        self._read = 0  # where the text begins that nothing was told of
        self._content: list[range] = []
        self._waiting: list[_Position] = []
        self._end = 0  # of the last position

    def add(self, text: str, steps: Sequence[Alternatives], logprobs: Sequence[Logprob]) -> None:
        """Log more text, and positions that are sent with it."""
        self._text += text
        for step, logprob in zip(steps, logprobs, strict=True):
            start, self._end = self._end, self._end + len(step.text)
            self._waiting.append(_Position(start, self._end, logprob))

    def skip(self, part: str) -> None:
        """Tell of text that is reasoning, or a call's arguments."""
        at = self._find(part)
        if at >= 0:
            self._read = at + len(part)

    def add_content(self, part: str) -> None:
        """Tell of text that the content continues with."""
        at = self._find(part)
        if at < 0:
            return
        self._read = at + len(part)
        if self._content and self._content[-1].stop == at:
            at = self._content.pop().start
        self._content.append(range(at, self._read))

    def take(self) -> list[Logprob]:
        """The positions of content that have not been taken yet."""
        taken = [each.logprob for each in self._waiting if self._is_content(each)]
        self._waiting = [each for each in self._waiting if each.start >= self._read]
        return taken

    def _find(self, part: str) -> int:
        """Where a text is that is told of next, or -1."""
        at = self._text.find(part, self._read)
        if at == self._read and self._content and self._content[-1].stop == at:
            return at  # content goes on
        # Markup comes first, which is a token and may hold the same letters.
        starts = (each.start for each in self._waiting if each.start >= self._read)
        return next((start for start in starts if self._text.startswith(part, start)), at)

    def _is_content(self, position: _Position) -> bool:
        end = max(position.end, position.start + 1)  # a part of a character has no text
        return any(part.start < end and position.start < part.stop for part in self._content)


def keep_content_logprobs(items: Iterable[Any], text: str, steps: Sequence[Alternatives]) -> None:
    """Leave to the content among the `items` of a whole output its own log probabilities."""
    items = list(items)
    texts = [part for item in items if item.type == "message" for part in item.content]
    if not texts or texts[0].logprobs is None:
        return
    log = ContentLog()
    log.add(text, steps, texts[0].logprobs)
    for item in items:
        for part in getattr(item, "content", None) or ():
            if item.type == "reasoning":
                log.skip(part.text)
            else:
                log.add_content(part.text)
                part.logprobs = log.take()


class StreamedLogprobs:
    """Puts log probabilities on the events of a stream."""

    def __init__(self) -> None:
        self.log = ContentLog()
        self._item: list[Logprob] = []  # of the content that is being streamed

    def complete(self, event: Any) -> list[Any]:
        """The event with its log probabilities, and behind what must be sent before it."""
        if event.type == "response.reasoning_text.delta":
            self.log.skip(event.delta)
        elif event.type == "response.function_call_arguments.done":
            self.log.skip(event.arguments)
        elif event.type == "response.output_text.delta":
            self.log.add_content(event.delta)
            event.logprobs = _to_stream_logprobs(self._take())
        elif event.type == "response.output_text.done":
            return self._rest_before(event)
        elif event.type == "response.content_part.done":
            self._set(event.part)
        elif event.type == "response.output_item.done" and event.item.type == "message":
            for part in event.item.content:
                self._set(part)
            self._item = []
        return [event]

    def _take(self) -> list[Logprob]:
        taken = self.log.take()
        self._item += taken
        return taken

    def _set(self, part: Any) -> None:
        if isinstance(part, ResponseOutputText):
            part.logprobs = self._item or None

    def _rest_before(self, done: Any) -> list[Any]:
        """The end of a content. A token that a stop string cuts comes behind its text."""
        rest = self._take()
        if not rest:
            return [done]
        delta = ResponseTextDeltaEvent(
            type="response.output_text.delta",
            sequence_number=-1,
            content_index=done.content_index,
            output_index=done.output_index,
            item_id=done.item_id,
            delta="",
            logprobs=_to_stream_logprobs(rest),
        )
        return [delta, done]
