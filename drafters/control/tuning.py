"""Every constant of the policy, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """Variances are of natural logarithms of seconds: 0.01 means about 10%.

    A figure "in bench/LOG.md" was measured; "simulated" ones are where `aerie simulate` and the
    tests of this package stop getting better.
    """

    # Observations that make an estimate: steps for which one holds at an unchanged load (LOG: it
    # costs 28 us), steps that a cost is known by, trials that outweigh a prior and never fade.
    enough: int = 16

    # Acceptance.
    memory_trials: float = 1000.0  # first drafts remembered: a standard error of 1.5%
    prior_acceptance: float = 0.7  # of a first draft before any: between the published heads

    # Seconds of a step.
    guess: tuple[float, float, float, float] = (1.0, 0.01, 0.008, 0.15)  # a step, a request, a
    # draft, a drafter pass, relative; mild, so that what looks cheap is tried and then measured
    step_noise: float = 0.01  # variance of one step around what its batch and K take (LOG: 8%)
    outlier: float = 3.0  # standard deviations beyond which one step is a pause, and two a new pace
    pace_noise: float = 0.005  # variance a second by which the whole machine's pace wanders (LOG)
    drift: float = 1e-4  # variance a second by which one K's cost wanders from the others'
    unproven: float = 0.25  # variance of a cost from calibration, or at another pace or batch:
    # beside a busy process steps took up to 3.5 times as long, which is within two deviations
    settling_s: float = 0.1  # seconds for which a plain step after drafts is slow (LOG: 22 changes)

    # The choice.
    hysteresis: float = 0.01  # gain that another K must promise; simulated: fewer than 1 switch/s

    # Trials of another K.
    optimism: float = 2.0  # standard deviations by which a K may be better than it looks
    probe_steps: int = 2  # steady steps of a trial: noise of 7%, below what K differ by
    probe_share: float = 0.006  # of the tokens may be lost to trials; control is to cost 1% in all
    probe_saved_s: float = 60.0  # seconds for which unused allowance lasts: not spent on a burst
