"""Decontamination: find prompts that quote texts on which heads are evaluated."""

from __future__ import annotations

import re
from collections.abc import Iterable

from drafters.train.data.humaneval import problems

NGRAM_WORDS = 10
_WORD = re.compile(r"\w+")


class Contamination:
    """The word n-grams of some texts, without case, spacing and punctuation; `text in ngrams` says
    whether a text has one of them."""

    def __init__(self, texts: Iterable[str], words: int = NGRAM_WORDS) -> None:
        self._words = words
        self._ngrams = {ngram for text in texts for ngram in self._of(text)}

    def __contains__(self, text: str) -> bool:
        return not self._ngrams.isdisjoint(self._of(text))

    def _of(self, text: str) -> set[tuple[str, ...]]:
        words = _WORD.findall(text.casefold())
        return {
            tuple(words[start : start + self._words])
            for start in range(len(words) - self._words + 1)
        }


def humaneval() -> Contamination:
    """The n-grams of HumanEval's prompts, each followed by its canonical solution."""
    return Contamination(problem.prompt + problem.canonical_solution for problem in problems())
