"""What steps of one batch size take at each K, told apart from how fast the machine is just now."""

from __future__ import annotations

import math
from collections.abc import Sequence

# Variances of logarithms: 0.01 is 10%.
NOISE = 0.01  # of one step,
FIRST = 10.0  # and so many times as much more of the first at a batch or K, less and less after it
PACE = 0.03  # of the machine's pace around its mean of late,
PACE_S = 2.0  # seconds that it keeps: a neighbour on the same cores, a client that is served
DRIFT = 0.0005  # that the mean gains in a second: a device gets hot, a neighbour moves in,
DRIFT_S = 60.0  # of as many seconds elsewhere at most
NEW = 0.1  # of a K's cost that nobody measured, around the fitted one,
ALIKE = 0.8  # that the next K errs likewise; plain steps have no drafter, nothing tells of them
CHANGE = 2e-5  # that a K's cost gains in a second of such a batch
CALIBRATED = 0.02  # of what a calibration says: it saw the machine at one pace
# Surprises, as logarithms.
LIMIT = 0.4  # a step that takes 20 times as long counts as 1.5,
ALONE = 10.0  # and is as telling as one so many times as noisy, unless the one before was like it
FAST = -1.1  # three times what is usual of the first step at a K: it was known less well than that
BUNCH = 8  # steps at one K that the covariance is corrected by at once, after as many one by one


class Row:
    """A Kalman filter of `log(seconds / fitted)` of steps: [k_max + 1] corrections, one for each K,
    which hardly change, and the machine's pace, which all K have in common: a drift, and what comes
    and goes around it.

    A K that met a slow machine looks dear until the pace is known, which another K tells just
    before or after it; and the longer the surer, as what lasts through many changes of the pace is
    the K's own. How much a step tells of either follows from their covariance.
    """

    def __init__(self, k_max: int, now: float) -> None:
        self._k_max, self._at = k_max, now
        self._k, self._settled, self._alone = -1, 0, True
        self._elapsed = self._seconds = 0.0  # since the covariance was corrected
        self._shared: list[float] = []  # covariance of each state with a step's time
        size = k_max + 3  # each K, the drift, the pace around it
        self._mean = [0.0] * size
        self._covariance = [[0.0] * size for _ in range(size)]
        self._covariance[0][0] = NEW
        for i in range(1, k_max + 1):
            for j in range(1, k_max + 1):
                self._covariance[i][j] = NEW * ALIKE ** abs(i - j)
        self._covariance[-1][-1] = PACE

    def of(self, k: int) -> float:
        """Log of what a step takes now over the fitted cost."""
        return self._mean[k] + self._mean[-2] + self._mean[-1]

    def calibrate(self, k: int, ratio: float, steps: float) -> None:
        """Log of seconds over the fitted cost, the mean of so many steps some time ago."""
        shared = self._covariance[k]
        total = shared[k] + CALIBRATED + NOISE / steps
        self._correct(shared, (ratio - self._mean[k]) / total)
        self._ascertain(shared, total)

    def learn(self, k: int, ratio: float, seconds: float, now: float) -> None:
        """A step: log of its seconds over the fitted cost, and when it ended."""
        elapsed = now - self._at
        self._settled = self._settled + 1 if k == self._k and elapsed < PACE_S else 0
        self._at, self._k = now, k
        self._mean[-1] *= math.exp(-elapsed / PACE_S)
        surprise = ratio - self.of(k)
        self._elapsed, self._seconds = self._elapsed + elapsed, self._seconds + seconds
        steps = 1 if self._settled <= BUNCH else BUNCH
        if self._settled % steps == 0:
            self._age(self._elapsed, self._seconds)
            self._elapsed = self._seconds = 0.0
            if surprise < FAST and not self._settled:  # no step is so fast by accident
                self._covariance[k][k] += surprise * surprise
            parts = (self._covariance[i] for i in (k, -2, -1))
            self._shared = [a + b + c for a, b, c in zip(*parts, strict=True)]
        noise = NOISE * (1.0 + FIRST / (1.0 + self._settled))
        known = self._shared[k] + self._shared[-2] + self._shared[-1]
        strange = surprise > LIMIT  # steps pause
        if strange:
            alone = ALONE if self._alone else 1.0
            self._correct(self._shared, LIMIT / (known + alone * noise))
        else:
            self._correct(self._shared, surprise / (known + noise))
            if self._settled % steps == 0:
                self._ascertain(self._shared, known + noise / steps)
        self._alone = not strange

    def refit(self, shifts: Sequence[float], measured: Sequence[bool]) -> None:
        """The fitted cost has changed by these, as logarithms. What was measured stays, other K
        follow the fit, as far from it as the nearest that was."""
        known = [k for k in range(1, self._k_max + 1) if measured[k]]
        for k, shift in enumerate(shifts):
            if measured[k]:
                self._mean[k] -= shift
        for k in range(self._k_max + 1):
            if not measured[k]:
                near = min(known, key=lambda other: abs(other - k)) if k and known else None
                self._mean[k] = 0.0 if near is None else ALIKE ** abs(near - k) * self._mean[near]

    def _age(self, elapsed: float, seconds: float) -> None:
        """Forget: since the last step here, and over this one."""
        covariance = self._covariance
        keeps = math.exp(-elapsed / PACE_S)
        covariance[-1] = [keeps * x for x in covariance[-1]]
        for row in covariance:
            row[-1] *= keeps
        covariance[-1][-1] += (1.0 - keeps * keeps) * PACE
        covariance[-2][-2] += DRIFT * min(elapsed, DRIFT_S)
        for k in range(self._k_max + 1):
            if covariance[k][k] < NEW:
                covariance[k][k] += CHANGE * seconds

    def _correct(self, shared: Sequence[float], by: float) -> None:
        self._mean = [mean + by * x for mean, x in zip(self._mean, shared, strict=True)]

    def _ascertain(self, shared: Sequence[float], total: float) -> None:
        """By a measurement of variance `total`, whose covariance with each state is `shared`."""
        for i, row in enumerate(self._covariance):
            part = shared[i] / total
            self._covariance[i] = [x - part * y for x, y in zip(row, shared, strict=True)]
