"""Sample user turns: generate behind prompts that end in an open turn, and decode the texts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from drafters.train.data.token_sequences import Text
from drafters.train.prompts.open_turn import OpenTurn
from drafters.train.prompts.openings import Opening, draw_openings
from drafters.train.prompts.sample import Sample


class Generate(Protocol):
    """A function that samples continuations as `respond` does: (index of the prompt, text)."""

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        seed: int,
        stop_tokens: Sequence[int],
        progress: Callable[[int], None] | None,
    ) -> Iterator[tuple[int, Text]]: ...


class TurnSampler:
    """Makes the samples of a run. A sample's opening and seed depend on its index alone."""

    def __init__(
        self,
        tokenizer: Any,
        generate: Generate,
        openings: Sequence[tuple[Opening, OpenTurn]],
        *,
        count: int,
        max_tokens: int,
        end_tokens: Sequence[int],
        seed: int,
    ) -> None:
        self._tokenizer, self._generate = tokenizer, generate
        self._openings, self._max_tokens, self._seed = openings, max_tokens, seed
        ends = {turn.end_token for _, turn in openings if turn.end_token is not None}
        self._end_tokens = sorted({*end_tokens, *ends})
        self._prompts = [turn.encode(tokenizer, opening.text) for opening, turn in openings]
        self._drawn = draw_openings([opening for opening, _ in openings], count, seed)

    def sample(
        self, start: int, stop: int, progress: Callable[[int], None] | None = None
    ) -> list[Sample]:
        """Generate the samples of indices `start` to `stop` together.

        `progress` gets numbers of new tokens, from `Generate`.
        """
        drawn = self._drawn[start:stop]
        prompts = [self._prompts[position] for position in drawn]
        seed = random.Random(f"samples:{self._seed}:{start}").getrandbits(31)
        samples: dict[int, Sample] = {}
        texts = self._generate(
            prompts, seed=seed, stop_tokens=self._end_tokens, progress=progress
        )  # fmt: skip
        for index, text in texts:
            samples[index] = self._of(text.tokens[text.prompt :].tolist(), drawn[index])
        return [samples[index] for index in range(len(drawn))]

    def _of(self, tokens: list[int], position: int) -> Sample:
        opening, turn = self._openings[position]
        ended = bool(tokens) and tokens[-1] in self._end_tokens
        text = self._decode(self._prompts[position], tokens[:-1] if ended else tokens)
        if turn.end_token is None:
            text, end, _ = text.partition(turn.end_text)
            ended = ended or bool(end)
        # A server may leave the end token out: a text below the limit ended by itself.
        cut = not ended and len(tokens) >= self._max_tokens
        return Sample(
            kind=opening.kind,
            opening=opening.text,
            text=opening.text + text,
            finish="length" if cut else "stop",
            tokens=len(tokens),
        )

    def _decode(self, prompt: list[int], tokens: list[int]) -> str:
        """The text of `tokens`, decoded behind `prompt`: some tokenizers drop a leading space."""
        before, whole = (
            self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            for ids in (prompt, prompt + tokens)
        )
        return whole[len(before) :]
