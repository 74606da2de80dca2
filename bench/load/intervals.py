"""Confidence intervals by bootstrap over rounds.

Rounds are the unit: within one round every system ran once, minutes apart at most, so what the
machine does falls on all of them. Ratios are taken between systems of the same rounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from bench.load.figures import quantile

RESAMPLES, CONFIDENCE = 2000, 0.95
FEWEST_ROUNDS = 3  # with fewer a bootstrap says nothing

Interval = tuple[float, float]
Speeds = Mapping[int, float]  # round -> tokens per second
Mean = Callable[[Sequence[float]], float]


def interval(
    rounds: Sequence[int], statistic: Callable[[Sequence[int]], float], seed: int = 0
) -> Interval | None:
    """Percentile interval of `statistic(rounds drawn with replacement)`; None for too few."""
    if len(rounds) < FEWEST_ROUNDS:
        return None
    rng = random.Random(f"bootstrap:{seed}")
    values = sorted(statistic(rng.choices(rounds, k=len(rounds))) for _ in range(RESAMPLES))
    tail = (1 - CONFIDENCE) / 2
    return quantile(values, tail), quantile(values, 1 - tail)


def of_equal_work(speeds: Sequence[float]) -> float:
    """All tokens over all seconds, where every round made as many: the harmonic mean."""
    return len(speeds) / sum(1.0 / speed for speed in speeds)


def of_equal_time(speeds: Sequence[float]) -> float:
    """All tokens over all seconds, where every round took as long. The harmonic mean would charge
    a method for prompts that differ, which drafts make of equal ones: a turn of a second and a half
    at one user lies in easy text or in hard."""
    return sum(speeds) / len(speeds)


def speed(speeds: Speeds, rounds: Sequence[int], *, mean: Mean = of_equal_work) -> float:
    """Tokens per second over these rounds."""
    return mean([speeds[number] for number in rounds])


def ratio(
    one: Speeds, other: Speeds, *, mean: Mean = of_equal_work
) -> tuple[float, Interval | None]:
    """Speed of `one` over that of `other` in the rounds that both have."""
    return over_best(one, [other], mean=mean)


def over_best(
    one: Speeds, others: Sequence[Speeds], *, mean: Mean = of_equal_work
) -> tuple[float, Interval | None]:
    """Speed of `one` over the fastest of `others`, which is chosen anew in every resample.

    The best of several is a little lucky, so this is on the careful side for `one`.
    """
    rounds = sorted(set(one).intersection(*others))
    if not rounds:
        raise ValueError("no round that all of them ran")

    def statistic(chosen: Sequence[int]) -> float:
        return speed(one, chosen, mean=mean) / max(
            speed(other, chosen, mean=mean) for other in others
        )

    return statistic(rounds), interval(rounds, statistic)
