"""What each K would take and make at a load."""

from __future__ import annotations

from dataclasses import dataclass

from drafters.control.policy import Load


@dataclass(frozen=True, slots=True)
class KPrediction:
    """What one K would take and make in a steady step."""

    k: int
    seconds: float
    variance: float  # of the natural logarithm of `seconds`
    tokens: float  # over all requests
    goodput: float  # tokens per second, with the drafter's reading of prompts
    value: float  # what to maximise: goodput, or 1 / TPOT (`Objective.values`)
    optimistic_value: float  # `value` with all uncertainty in favour of the K

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
