"""What each K would take and make at a load."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from drafters.control.acceptance import Acceptance
from drafters.control.cost_table import CostTable
from drafters.control.objective import Objective
from drafters.control.policy import Load
from drafters.control.read_costs import ReadCosts
from drafters.control.traffic import Traffic
from drafters.control.tuning import Tuning


@dataclass(frozen=True, slots=True)
class KPrediction:
    """What one K would take and make in a steady step."""

    k: int
    seconds: float
    variance: float  # of the natural logarithm of `seconds`
    tokens: float  # over all requests
    goodput: float  # tokens per second, with the drafter's reading of prompts
    value: float  # what to maximise: goodput, or 1 / TPOT (`Objective.values`)
    optimistic_value: float  # what `value` may be, if cost and acceptance are better than estimated
    times_as_good: float  # how many times the estimated goodput it may then be: 1 or more

    @property
    def steady_tokens_per_second(self) -> float:
        """Tokens per second while no prompt is read."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Predictions:
    """The predictions of every K that may be chosen, at one load."""

    load: Load
    step: int  # number of steps observed before
    by_k: dict[int, KPrediction]  # in rising order of K

    @property
    def best(self) -> KPrediction:
        """The one with the highest value; of equal ones that with the smallest K."""
        return max(self.by_k.values(), key=lambda prediction: prediction.value)


class Predictor:
    """Predicts a step at each K of `ks` from costs and acceptance, which others keep learning."""

    def __init__(
        self,
        ks: Sequence[int],
        costs: CostTable,
        acceptance: Acceptance,
        read_costs: ReadCosts,
        traffic: Traffic,
        tuning: Tuning,
    ) -> None:
        self._ks = ks
        self._costs = costs
        self._acceptance = acceptance
        self._read_costs = read_costs
        self._traffic = traffic
        self._tuning = tuning

    @property
    def k_max(self) -> int:
        """The largest K that may be chosen."""
        return self._ks[-1]

    def captured_k(self, k: int) -> int:
        """The K whose CUDA graph runs a step of `k` draft tokens a request: `k` itself or the next
        larger one, to which the device pads the step; the largest if `k` is beyond it."""
        return self._ks[bisect_left(self._ks, min(k, self._ks[-1]))]

    def predict(self, load: Load, objective: Objective, step: int) -> Predictions:
        """Predict a step of `load` at each K; `step` is how many steps were observed before."""
        costs = self._costs.row(load.requests)
        tokens_by_k = self._acceptance.tokens(load)
        read_seconds = self._read_seconds_per_output_token()
        seconds, variances, tokens, goodput = [], [], [], []
        for k in self._ks:
            # Requests with limits have fewer draft tokens: the step is one of a smaller K.
            cost = costs[self.captured_k(load.cost_k(k))]
            reading = read_seconds * tokens_by_k[k] if k else 0.0
            seconds.append(cost.seconds)
            variances.append(cost.variance)
            tokens.append(tokens_by_k[k])
            goodput.append(tokens_by_k[k] / (cost.seconds + reading))
        tpots = self._tpots(load, seconds, tokens)
        values = objective.values(goodput, tpots)
        times_as_good = self._times_as_good(load, seconds, variances, tokens)
        optimistic = objective.values(
            [rate * times for rate, times in zip(goodput, times_as_good, strict=True)],
            [tpot / times for tpot, times in zip(tpots, times_as_good, strict=True)],
        )
        by_k = {
            k: KPrediction(
                k=k,
                seconds=seconds[i],
                variance=variances[i],
                tokens=tokens[i],
                goodput=goodput[i],
                value=values[i],
                optimistic_value=optimistic[i],
                times_as_good=times_as_good[i],
            )
            for i, k in enumerate(self._ks)
        }
        return Predictions(load, step, by_k)

    def _tpots(self, load: Load, seconds: Sequence[float], tokens: Sequence[float]) -> list[float]:
        """Seconds per output token of a request at each of the K, [ks].

        A step also reads prompts: the recent average, not this load's, as predictions hold for
        later steps too. At K > 0 the drafter reads them as well.
        """
        prompt_tokens = self._traffic.prompt_tokens
        target_s = self._read_costs.target.seconds
        drafter_s = self._read_costs.measured_drafter_seconds_per_token
        tpots = []
        for i, k in enumerate(self._ks):
            read_s = target_s + drafter_s if k else target_s
            tpots.append(load.requests * (seconds[i] + prompt_tokens * read_s) / tokens[i])
        return tpots

    def _read_seconds_per_output_token(self) -> float:
        """Seconds that the drafter spends on prompts at K > 0, for each output token."""
        if not self._traffic.output_tokens:
            return 0.0
        prompt_share = self._traffic.prompt_tokens / self._traffic.output_tokens
        return prompt_share * self._read_costs.measured_drafter_seconds_per_token

    def _times_as_good(
        self, load: Load, seconds: Sequence[float], variances: Sequence[float],
        tokens: Sequence[float],
    ) -> list[float]:  # fmt: skip
        """How many times as good each of the K may be, [ks]: costs and acceptance better by
        `Tuning.optimism` deviations each.

        A step may be as cheap as its variance allows, but no cheaper than with fewer draft tokens.
        The tokens of a request's step are about geometrically distributed.
        """
        deviations = self._tuning.optimism
        trials = self._acceptance.trials[0] if self._acceptance.trials else 1.0
        least_seconds = 0.0
        times_as_good = []
        for i in range(len(self._ks)):
            cheap = math.exp(-deviations * math.sqrt(variances[i])) * seconds[i]
            least_seconds = max(least_seconds, cheap)
            deviation = math.sqrt((1.0 - load.requests / tokens[i]) / trials)
            times_as_good.append(seconds[i] / least_seconds * math.exp(deviations * deviation))
        return times_as_good
