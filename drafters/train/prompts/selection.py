"""Select the samples that become prompts, by all filters in order, and count what each drops."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drafters.train.prompts.contamination import Contamination
from drafters.train.prompts.filters import (
    COMPLETION,
    complete_turn,
    is_printable,
    repeated_share,
)
from drafters.train.prompts.near_duplicates import NearDuplicateIndex, shingles
from drafters.train.prompts.sample import Sample
from drafters.train.prompts.unfinished import unfinished_for_half


@dataclass(frozen=True, slots=True)
class FilterBounds:
    """The adjustable bounds of the filters."""

    min_tokens: int = 4  # of the whole turn
    max_tokens: int = 512
    repeated: float = 0.5  # the largest share of words in repeated runs
    similarity: float = 0.6  # Jaccard similarity of word shingles that makes a near duplicate


@dataclass(frozen=True, slots=True)
class SelectedPrompt:
    """A prompt that passed all filters, and its kind."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Selection:
    """The prompts that were kept, and how many each filter dropped."""

    kept: list[SelectedPrompt]
    dropped: dict[str, int]  # by filter, in the order in which they run


def select(
    samples: Sequence[Sample],
    *,
    limits: FilterBounds,
    count_tokens: Callable[[Sequence[str]], list[int]],
    special_tokens: Sequence[str],
    contamination: Sequence[tuple[str, Contamination]] = (),
    avoid: Sequence[str] = (),
) -> Selection:
    """Filter the samples. A dropped one counts for the first filter that drops it.

    Half of the code to complete loses its first function's body before it is filtered
    (unfinished.py).

    `contamination` has pairs of a name and the n-grams that no prompt may share. No prompt is a
    duplicate or near duplicate of another, or of a text in `avoid`.
    """
    turns = [_turn(sample) for sample in samples]
    lengths = iter(count_tokens([turn for turn in turns if turn is not None]))
    sets = [shingles(turn or "") for turn in turns]
    avoided = [shingles(text) for text in avoid]
    frequency = Counter(shingle for members in (*sets, *avoided) for shingle in members)
    index = NearDuplicateIndex(limits.similarity, frequency)
    for members in avoided:
        index.add(members)
    exact = {normalised(text) for text in avoid}
    kept: list[SelectedPrompt] = []
    dropped = dict.fromkeys(
        ["incomplete", "too short", "too long", "not printable", "loops",
         *(name for name, _ in contamination), "duplicate", "near duplicate"], 0,
    )  # fmt: skip

    def reason(turn: str | None, members: frozenset[int]) -> str | None:
        if turn is None:
            return "incomplete"
        tokens = next(lengths)
        if tokens < limits.min_tokens:
            return "too short"
        if tokens > limits.max_tokens:
            return "too long"
        if not is_printable(turn, special_tokens):
            return "not printable"
        if repeated_share(turn) > limits.repeated:
            return "loops"
        for name, ngrams in contamination:
            if turn in ngrams:
                return name
        if normalised(turn) in exact:
            return "duplicate"
        return "near duplicate" if members in index else None

    for sample, turn, members in zip(samples, turns, sets, strict=True):
        if (why := reason(turn, members)) is not None:
            dropped[why] += 1
            continue
        assert turn is not None
        exact.add(normalised(turn))
        index.add(members)
        kept.append(SelectedPrompt(sample.kind, turn))
    return Selection(kept, dropped)


def _turn(sample: Sample) -> str | None:
    turn = complete_turn(sample)
    return turn if turn is None or sample.kind != COMPLETION else unfinished_for_half(turn)


def normalised(text: str) -> str:
    """The text with case folded and white space collapsed."""
    return " ".join(text.casefold().split())


def is_held_out(text: str, share: float) -> bool:
    """Whether a prompt belongs to the held-out `share` (0 to 1) of all texts, by a hash of it.

    A text is on the same side in every run with this share. What a smaller share holds out, a
    larger one does too. Case and white space make no difference.
    """
    digest = hashlib.sha256(normalised(text).encode(errors="replace")).digest()
    return int.from_bytes(digest[:8]) < share * 2**64
