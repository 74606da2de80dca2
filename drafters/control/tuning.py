"""Every constant of the policy, in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class CostTerms(NamedTuple):
    """A step at K takes step + requests * (request + draft * K) + drafter_pass, if K > 0."""

    step: float
    request: float
    draft: float
    drafter_pass: float


@dataclass(frozen=True, slots=True)
class Tuning:
    """Variances are of natural logarithms of seconds: 0.01 means about 10%.

    LOG: measured, in bench/LOG.md. Simulated: where `aerie simulate` and the tests of this package
    stop getting better. A quantity that shares a figure is named where it is used.
    """

    averaging_steps: int = 16  # steps in an exponential average: of noise, of seconds per token

    # Acceptance.
    memory: float = 1000.0  # first drafts (standard error 1.5%), steps of traffic remembered
    prior_acceptance: float = 0.7  # of a first draft before any: between the published heads

    # Seconds of a step.
    guess: CostTerms = CostTerms(1.0, 0.01, 0.008, 0.15)  # noqa: RUF009 - it is immutable
    # Relative; mild, so that what looks cheap is tried and then measured.
    step_noise: float = 0.01  # variance of one step around what its batch and K take (LOG: 8%)
    outlier: float = 3.0  # standard deviations beyond which one step is a pause, two a new pace;
    # also how many times smaller that of noise becomes when a disturbance ends
    pace_noise: float = 0.005  # variance a second by which the whole machine's pace wanders (LOG)
    drift: float = 1e-4  # variance a second by which one K's cost wanders from the others'
    unmeasured_variance: float = 0.25  # of a cost that service has not measured, the largest:
    # beside a busy process steps took up to 3.5 times as long, which is within two deviations
    settling_s: float = 0.1  # seconds for which a plain step after drafts is slow (LOG: 22 changes)

    # The choice.
    hysteresis: float = 0.01  # gain that another K must promise; simulated: fewer than 1 switch/s

    # Probes: trials of another K.
    optimism: float = 2.0  # standard deviations by which a K may be better than it looks
    probe_steps: int = 2  # steady steps of a probe: noise of 7%, below what K differ by
    probe_share: float = 0.006  # of the tokens may be lost to probes; control is to cost 1% in all
    probe_saved_s: float = 60.0  # seconds for which unused allowance lasts: not spent on a burst
