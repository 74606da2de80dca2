"""Every constant of the controller, in one place. The classes of matches are in `draft_plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class CostTerms(NamedTuple):
    """A step at K takes step + requests * (request + draft_token * K) seconds, and drafter_pass
    more if K > 0."""

    step: float
    request: float
    draft_token: float
    drafter_pass: float


@dataclass(frozen=True, slots=True)
class Tuning:
    """The constants, by what they are used for.

    A variance is that of the natural logarithm of seconds: 0.01 is a standard deviation of about
    10%. "Measured" refers to bench/LOG.md. "Simulated" is where `aerie simulate` and the tests of
    this package stop getting better.
    """

    # Acceptance.
    acceptance_memory: float = 1000.0  # requests' drafts remembered: a standard error of 1.5%
    prior_acceptance: float = 0.7  # at the first position before any: between published heads
    # Trials that a prior weighs: that of the first position, and at each later one the rate of the
    # position before it.
    prior_trials: float = 16.0
    # What the rates of a head weigh after a swap, in trials of the first position: under a second
    # of service.
    swapped_trials: float = 64.0

    # Lookups.
    # Acceptance of a lookup's draft token before any was seen, for each of `MATCH_CLASSES`
    # (sources/draft_plan.py): between that of chat and that of copied text.
    prior_match_acceptance: tuple[float, ...] = (0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.9)
    # The same of a forced span. It is below 1, as the target may cut the text into other tokens.
    prior_span_acceptance: float = 0.85
    # The share of its price that a lookup must gain, as gain and price are estimates. Simulated:
    # where no lookup pays, 0.99 of the tokens without drafts, and 0.97 without a margin. Where
    # lookups pay it changes nothing.
    lookup_margin: float = 0.25
    # Proportions by which the seconds of a pass of the head are carried to other batches and K.
    pass_terms: CostTerms = CostTerms(1.0, 0.1, 0.02, 0.0)  # noqa: RUF009 - it is immutable
    rate_memory_steps: float = 32.0  # steps in the average of tokens per second
    rate_prior_tokens: float = 4.0  # tokens of each request that the expected rate weighs in it
    # A step teaches the cost of the nearest whole number of draft tokens per request. Its seconds
    # are scaled to that number first, unless it differs by a smaller share than this.
    unscaled_share: float = 0.1

    # Seconds of a steady step.
    step_noise: float = 0.01  # variance of one step around its cost; measured: deviation of 8%
    pace_memory_steps: int = 16  # steps in the average of the machine's pace
    noise_memory_steps: int = 16  # steps in the average of the variance around the cost
    outlier_deviations: float = 3.0  # a step further from its cost counts as this far
    cost_noise: float = 5e-4  # variance that a cost gains in each second without a measurement
    # Variance of a cost before service measures it, and the most that it can have. Beside a busy
    # process, steps of the calibration took up to 3.5 times as long: 2.5 standard deviations.
    unmeasured_variance: float = 0.25
    octave_variance: float = 0.25  # variance added at twice or half the measured batch (an octave)
    settling_s: float = 0.1  # for which plain steps are slow after drafts; measured: 22 switches
    # Proportions by which a measured cost is carried to other batches and K. They are low, so that
    # a K which may be cheap is tried, and thereby measured.
    guessed_terms: CostTerms = CostTerms(1.0, 0.01, 0.008, 0.15)  # noqa: RUF009 - it is immutable

    # Seconds to read a prompt token.
    read_memory_steps: int = 16  # steps with prompts in the average
    read_cost_deviation: float = 0.5  # standard deviation of its logarithm
    traffic_memory_steps: float = 1000.0  # steps in the average of prompt and output tokens

    # The choice.
    hysteresis: float = 0.01  # gain that another K must promise; simulated: under 1 switch a second
    prediction_steps: int = 16  # steps for which predictions hold; measured: 28 us each
    unsettled_prediction_steps: int = 2  # the same while the batch or its K is new

    # Probes: a few steps with another K.
    # A K is tried if it would be better than the K in force, were its cost and its acceptance each
    # so many standard deviations better than estimated.
    optimism: float = 2.0
    probe_steps: int = 2  # steady steps of a probe: noise of 7%, below what K differ by
    probe_share: float = 0.006  # share of the tokens that probes may lose; all control may cost 1%
    allowance_s: float = 60.0  # time constant in which unused allowance fades: bursts are bounded
    plain_probe_s: float = 60.0  # K = 0 may be probed once in it whatever was lost: 0.2% of it
