"""Confidence intervals by bootstrap over rounds, with Student's t since rounds are few.

Rounds are the unit that is resampled. In each round every system ran once, at most minutes apart,
so that changes of the machine affect all of them. Ratios are taken within rounds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from statistics import pstdev

from drafters.small_samples import half_width

RESAMPLES = 2000
FEWEST_ROUNDS = 3  # with two, Student's t is 12.7, and no difference shows

Interval = tuple[float, float]
Speeds = Mapping[int, float]  # round -> tokens per second
Mean = Callable[[Sequence[float]], float]


def interval(
    rounds: Sequence[int], statistic: Callable[[Sequence[int]], float], seed: int = 0
) -> Interval | None:
    """95% interval of `statistic`, which lies in its middle on a scale of logarithms.

    None for fewer than FEWEST_ROUNDS, or if the statistic is not positive in every resample.

    The standard error is that over rounds drawn with replacement, times Student's t. Percentiles of
    the resamples would be the worst and the best of three rounds, between which the truth lies
    three times in four; and those of a ratio over the fastest of several lie too low, since one of
    the others is fast by luck twice: in the rounds and in the resample.
    """
    if len(rounds) < FEWEST_ROUNDS:
        return None
    rng = random.Random(f"bootstrap:{seed}")
    values = [statistic(rng.choices(rounds, k=len(rounds))) for _ in range(RESAMPLES)]
    if min(values) <= 0:
        return None
    factor = math.exp(half_width(len(rounds)) * pstdev(map(math.log, values)))
    centre = statistic(rounds)
    return centre / factor, centre * factor


def of_equal_work(speeds: Sequence[float]) -> float:
    """All tokens over all seconds if every round made equally many tokens: the harmonic mean."""
    return len(speeds) / sum(1.0 / speed for speed in speeds)


def of_equal_time(speeds: Sequence[float]) -> float:
    """All tokens over all seconds if every round took equally long: the arithmetic mean. The
    harmonic mean would charge a method for text that differs between rounds: with one user, a turn
    of 1.5 s lies in text that is easy to draft or in text that is hard."""
    return sum(speeds) / len(speeds)


def speed(speeds: Speeds, rounds: Sequence[int], *, mean: Mean = of_equal_work) -> float:
    """Tokens per second over these rounds, joined by `mean`."""
    return mean([speeds[number] for number in rounds])


def ratio(
    one: Speeds, other: Speeds, *, mean: Mean = of_equal_work
) -> tuple[float, Interval | None]:
    """Speed of `one` over that of `other` in the rounds that both have, with its interval."""
    return over_best(one, [other], mean=mean)


def over_best(
    one: Speeds, others: Sequence[Speeds], *, mean: Mean = of_equal_work
) -> tuple[float, Interval | None]:
    """Speed of `one` over the fastest of `others`, which is chosen anew in every resample.

    The fastest of several is fast by luck too, so that the ratio errs against `one`; that of
    `over_best_of_other_rounds` does not. Raises ValueError if there is no round that all of them
    ran.
    """
    rounds = sorted(set(one).intersection(*others))
    if not rounds:
        raise ValueError("no round that all of them ran")

    def statistic(chosen: Sequence[int]) -> float:
        return speed(one, chosen, mean=mean) / max(
            speed(other, chosen, mean=mean) for other in others
        )

    return statistic(rounds), interval(rounds, statistic)


def over_best_of_other_rounds(
    one: Speeds, others: Sequence[Speeds], *, mean: Mean = of_equal_work
) -> float | None:
    """Speed of `one` over that of `others`, each round of which is that of the one that was fastest
    in all the other rounds (leave-one-out cross-validation); None for fewer than FEWEST_ROUNDS.

    So the choice is made after the fact, but luck in a round does not decide who it counts for. It
    has no interval: in a resample the other rounds hold copies of the round itself.
    """
    rounds = sorted(set(one).intersection(*others))
    if len(rounds) < FEWEST_ROUNDS:
        return None
    rivals = []
    for number in rounds:
        rest = [other for other in rounds if other != number]
        best = max(others, key=lambda speeds: speed(speeds, rest, mean=mean))
        rivals.append(best[number])
    return speed(one, rounds, mean=mean) / mean(rivals)
