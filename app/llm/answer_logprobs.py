"""Log probabilities of the tokens that make up an answer's text, and of no others.

vLLM reports those of every token that was sampled: also of the token that ends a turn, of a stop
string and of special tokens, which the text does not have. Here a token counts once the text that
the client has been sent reaches to its end, and not at all if it adds nothing to the text. No vllm
import.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

_ATTRIBUTE = "aerie_text_log"  # on vLLM's RequestState of a sequence that is watched


class Alternatives(dict[int, Any]):
    """vLLM's Logprob by token id at one position, in order of probability.

    `chosen` is the id of the token that was sampled there, and `text` what it added to the answer,
    where texts are watched.
    """

    text: str = ""

    def __init__(self, chosen: int, step: dict[int, Any]) -> None:
        super().__init__(sorted(step.items(), key=lambda entry: -entry[1].logprob))
        self.chosen = chosen


class TextLog:
    """The text of each token of a sequence, and how far its tokens have been handed out.

    `special` are the ids of special tokens, which may have no text in an answer.
    """

    def __init__(self, special: Collection[int]) -> None:
        self._special = special
        self._texts: list[str] = []
        self._waiting: deque[Alternatives] = deque()
        self._taken = 0  # tokens handed out or left out
        self._characters_sent = 0
        self._characters_taken = 0

    def add_text(self, text: str) -> str:
        """Log the text that the next token added to the answer; returns it."""
        self._texts.append(text)
        return text

    def take(
        self, steps: Iterable[Alternatives], text: str, *, finished: bool
    ) -> list[Alternatives]:
        """The positions to send along with an output of these positions and this text."""
        self._waiting += steps
        self._characters_sent += len(text)
        taken: list[Alternatives] = []
        while self._waiting:
            detokenised = self._taken < len(self._texts)  # the token that ends a turn is not
            added = self._texts[self._taken] if detokenised else ""
            room = self._characters_sent - self._characters_taken
            if len(added) > room and not finished:
                break  # it may turn out to be a stop string
            step = self._waiting.popleft()
            step.text = added
            self._taken += 1
            self._characters_taken += len(added)
            # A part of a character has no text either: the token that completes it has.
            is_part = detokenised and not added and step.chosen not in self._special
            if is_part or (added and room > 0):
                taken.append(step)
        return taken


def watch_texts(sequence: Any, special: Collection[int]) -> None:
    """Start a log for a RequestState of vLLM (vllm/v1/engine/output_processor.py)."""
    decode = getattr(sequence.detokenizer, "decode_next", None)
    if decode is None:  # without a tokenizer there is no text
        return
    log = TextLog(special)
    setattr(sequence, _ATTRIBUTE, log)
    sequence.detokenizer.decode_next = lambda token: log.add_text(decode(token))


def keep_answer_logprobs(output: Any, sequences: Iterable[Any]) -> None:
    """Leave to each choice of a RequestOutput of vLLM the log probabilities that belong to text.

    `sequences` are those that may be watched.
    """
    logs = {
        sequence.request_index: log
        for sequence in sequences
        if sequence.external_req_id == output.request_id
        and (log := getattr(sequence, _ATTRIBUTE, None)) is not None
    }
    for choice in output.outputs:
        if (log := logs.get(choice.index)) is not None and choice.logprobs is not None:
            finished = choice.finish_reason is not None
            choice.logprobs = log.take(choice.logprobs, choice.text, finished=finished)


def chosen_tokens(steps: Sequence[Any], tokens: Sequence[int]) -> list[int]:
    """The token that was sampled at each position; `tokens` are those of an output or a prompt,
    which count where the position does not know its own."""
    return [
        step.chosen if isinstance(step, Alternatives) else tokens[index]
        for index, step in enumerate(steps)
    ]
