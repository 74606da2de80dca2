"""Nelder and Mead's simplex search, for fits of a few positive numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

_TOLERANCE = 1e-9
_STEP = 0.4  # of the first simplex, in logarithms


def minimise(
    loss: Callable[[Sequence[float]], float], start: Sequence[float], evaluations: int = 4000
) -> list[float]:
    """Positive numbers at which `loss` has a minimum, near `start`; searches their logarithms."""

    def value(point: Sequence[float]) -> float:
        return loss([math.exp(x) for x in point])

    origin = [math.log(x) for x in start]
    points = [origin]
    points += [[x + _STEP * (i == j) for j, x in enumerate(origin)] for i in range(len(origin))]
    simplex = sorted((value(point), point) for point in points)
    for _ in range(evaluations // 2):
        if simplex[-1][0] - simplex[0][0] < _TOLERANCE:
            break
        worst = simplex[-1][1]
        others = [point for _, point in simplex[:-1]]
        centre = [sum(column) / len(others) for column in zip(*others, strict=True)]

        def along(reach: float, c: list[float] = centre, w: list[float] = worst) -> list[float]:
            return [x + reach * (x - y) for x, y in zip(c, w, strict=True)]

        moved = along(1.0)
        found = value(moved)
        if found < simplex[0][0]:
            further = along(2.0)
            simplex[-1] = min((value(further), further), (found, moved))
        elif found < simplex[-2][0]:
            simplex[-1] = (found, moved)
        else:
            nearer = along(0.5 if found < simplex[-1][0] else -0.5)
            if (inside := value(nearer)) < min(found, simplex[-1][0]):
                simplex[-1] = (inside, nearer)
            else:
                best = simplex[0][1]
                shrunk = [[(x + y) / 2.0 for x, y in zip(best, p, strict=True)] for p in others[1:]]
                shrunk.append([(x + y) / 2.0 for x, y in zip(best, worst, strict=True)])
                simplex = [simplex[0], *((value(point), point) for point in shrunk)]
        simplex.sort()
    return [math.exp(x) for x in simplex[0][1]]
