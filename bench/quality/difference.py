"""Where two greedy answers differ first, and how far apart the two tokens' logits are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.quality.answers import Answer

# Between 32 and 64, bfloat16 logits are multiples of 1/4. Two answers may differ where candidates
# are one such step apart in one of them.
TOLERANCE = 0.25
_ROUNDING = 1e-6  # of log-probabilities, which are differences of numbers of this size


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position at which two answers have different tokens.

    `gap` is the log-probability of the token without drafts less that of the token with drafts, in
    nats, in the pass without drafts that chose the former; logits differ by as much. It is None if
    it is not known: the token with drafts is not among the most probable, or one answer is the
    beginning of the other.
    """

    position: int
    with_drafts: int | None  # token; None where the answer has ended
    without_drafts: int | None
    gap: float | None

    def is_tie(self, tolerance: float) -> bool:
        """Whether rounding explains the difference: the gap is at most `tolerance` nats."""
        return self.gap is not None and self.gap <= tolerance + _ROUNDING


def difference(drafted: Answer, plain: Answer) -> Difference | None:
    """Compare two answers to one prompt; None if they have the same tokens.

    Raises RuntimeError if the prompts were tokenised differently.
    """
    if drafted.prompt_tokens != plain.prompt_tokens:
        raise RuntimeError("the server tokenised the same messages differently")
    if drafted.tokens == plain.tokens:
        return None
    position = common(drafted.tokens, plain.tokens)
    if position == min(len(drafted.tokens), len(plain.tokens)):
        ends = [_token(answer, position) for answer in (drafted, plain)]
        return Difference(position, ends[0], ends[1], None)
    first, second = drafted.tokens[position], plain.tokens[position]
    scores, gap = plain.likeliest[position], None
    if first in scores and second in scores:
        gap = scores[second] - scores[first]
    return Difference(position, first, second, gap)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _token(answer: Answer, position: int) -> int | None:
    return answer.tokens[position] if position < len(answer.tokens) else None
