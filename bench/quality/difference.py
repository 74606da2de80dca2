"""Where two greedy answers differ first, and how far apart the two tokens' logits are there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.quality.answers import Answer

# Between 16 and 32, bfloat16 logits are multiples of 1/8. Two answers may differ where candidates
# are one such step apart, and the pass that measures the gap may be off by another.
TOLERANCE = 0.25


@dataclass(frozen=True, slots=True)
class Difference:
    """The first position at which two answers have different tokens.

    `gap` is the log-probability of the most probable token less that of the less probable of the
    two, in nats; logits differ by as much. It is None if it is not known: one of the tokens is not
    among the most probable, or one answer is the beginning of the other.
    """

    position: int
    with_drafts: int | None  # token; None where the answer has ended
    without_drafts: int | None
    gap: float | None

    def is_tie(self, tolerance: float) -> bool:
        """Whether rounding explains the difference: the gap is at most `tolerance` nats."""
        return self.gap is not None and self.gap <= tolerance


async def difference(
    drafted: Answer,
    plain: Answer,
    score: Callable[[list[int]], Awaitable[Mapping[int, float]]],
) -> Difference | None:
    """Compare two answers to one prompt; None if they have the same tokens.

    `score` returns the log-probabilities of the most probable tokens behind a prefix, computed
    without drafts. Raises RuntimeError if the prompts were tokenised differently.
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
    scores = await score([*plain.prompt_tokens, *plain.tokens[:position]])
    gap = None
    if first in scores and second in scores:
        gap = max(scores.values()) - min(scores[first], scores[second])
    return Difference(position, first, second, gap)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _token(answer: Answer, position: int) -> int | None:
    return answer.tokens[position] if position < len(answer.tokens) else None
