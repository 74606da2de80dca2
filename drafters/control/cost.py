"""What a step costs at a batch and a K: a few physical terms, fitted to measured cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# A cost is the sum of these, none of them negative. The logarithm stands for what levels off
# (experts of a mixture that a step touches), the knee for compute that overtakes memory.
TERMS = (
    "step",  # weights read, launches, scheduling
    "log2 of the target's tokens",
    "request",
    "draft token",  # verified and drafted, which a steady step does with the same number
    "token behind the knee",
    "context token",
    "drafter pass",
    "request that is drafted for",  # the drafter reads what the target made of it
)
KNEE = 256.0  # tokens; where a GPU turns from memory-bound to compute-bound, within a factor of 2

# Before anything is measured: relative to the time of one plain step. Mild on purpose: drafts
# that look cheap are tried, and then measured.
GUESS = (1.0, 0.02, 0.005, 0.004, 0.004, 2e-6, 0.15, 0.002)
_GUESS_WEIGHT = 0.0005  # of each term, to a measured step
TRUST = 2.0  # steps that make a cell half as good as any number of them: then the terms are wrong
LEAST = 0.01  # of the cheapest cell: what a step costs whatever it does
_SWEEPS = 30


@dataclass(slots=True)
class Cell:
    """Steady steps at about the same batch and one K; the means are over recent steps."""

    requests: float
    k: int
    context: float  # tokens in the KV cache, over all requests
    seconds: float  # geometric mean
    weight: float = 1.0  # steps, up to a limit
    beyond: float = 0.0  # drafts of a step, over all requests, more than requests * k


class CostModel:
    """Seconds of a steady step: all requests verify K drafts and K more are drafted.

    `beyond`: so many more over all requests, of those verified as of those drafted, or fewer.
    """

    def __init__(self) -> None:
        self.coefficients: list[float] = []  # of TERMS, in seconds; empty before the first fit

    def row(self, requests: float, context: float, beyond: Sequence[float]) -> list[float]:
        """Seconds at each K, with so many drafts beyond it: [k_max + 1]."""
        return [self.seconds(requests, k, context, more) for k, more in enumerate(beyond)]

    def seconds(self, requests: float, k: int, context: float, beyond: float = 0.0) -> float:
        """At one K: the coefficients times `_terms`, written out because every step asks."""
        step, level, request, draft, knee, cached, drafter, reader = self.coefficients
        drafts = max(0.0, requests * k + beyond)
        tokens = requests + drafts
        seconds = step + level * math.log2(tokens) + request * requests + cached * context
        if k:
            seconds += draft * drafts + drafter + reader * requests
        if tokens > KNEE:
            seconds += knee * (tokens - KNEE)
        return seconds

    def fit(self, cells: Sequence[Cell]) -> None:
        """Non-negative least squares of the relative error, from where the last fit ended."""
        scale = min(cell.seconds / _dot(GUESS, _terms(cell)) for cell in cells)
        size = len(TERMS)
        products = [[0.0] * size for _ in range(size)]
        sums = [0.0] * size
        for cell in cells:
            terms = [x / cell.seconds for x in _terms(cell)]
            trust = cell.weight / (cell.weight + TRUST)
            for i, x in enumerate(terms):
                weighted = trust * x
                sums[i] += weighted
                row = products[i]
                for j in range(size):
                    row[j] += weighted * terms[j]
        for i, share in enumerate(GUESS):
            products[i][i] += _GUESS_WEIGHT / (scale * share) ** 2
            sums[i] += _GUESS_WEIGHT / (scale * share)
        if not self.coefficients:
            self.coefficients = [scale * share for share in GUESS]
        solution = self.coefficients
        least = LEAST * min(cell.seconds for cell in cells)  # so that no cost is zero
        for _ in range(_SWEEPS):  # coordinate descent
            for i, row in enumerate(products):
                if row[i] > 0.0:
                    rest = _dot(row, solution) - row[i] * solution[i]
                    solution[i] = max(least if i == 0 else 0.0, (sums[i] - rest) / row[i])


def _terms(cell: Cell) -> tuple[float, ...]:
    drafts = max(0.0, cell.requests * cell.k + cell.beyond)
    tokens = cell.requests + drafts
    return (
        1.0,
        math.log2(tokens),
        cell.requests,
        drafts,
        max(0.0, tokens - KNEE),
        cell.context,
        float(cell.k > 0),
        cell.requests * (cell.k > 0),
    )


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(left, right, strict=True))
