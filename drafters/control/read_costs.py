"""Seconds per token to read: prompts, and for the drafter also the tokens that it has missed."""

from __future__ import annotations

from drafters.control.policy import Load
from drafters.control.tuning import Tuning


class PerTokenCost:
    """Least-squares slope of seconds over tokens, through the origin, with forgetting."""

    def __init__(self, tuning: Tuning) -> None:
        self._weight = 1.0 / tuning.read_memory_steps  # of the newest step
        self._tokens_times_seconds = 0.0  # averages
        self._tokens_squared = 0.0

    @property
    def seconds(self) -> float:
        """Seconds per token; 0 before the first observation."""
        if not self._tokens_squared:
            return 0.0
        return self._tokens_times_seconds / self._tokens_squared

    def observe(self, tokens: float, extra_seconds: float) -> None:
        """Learn from a step that read `tokens` and took `extra_seconds` more than without them."""
        product = tokens * max(0.0, extra_seconds)
        self._tokens_times_seconds += self._weight * (product - self._tokens_times_seconds)
        self._tokens_squared += self._weight * (tokens * tokens - self._tokens_squared)


class ReadCosts:
    """Seconds per token of the target, which reads prompts, and of the drafter, which reads
    prompts and whatever was made while it did not run."""

    def __init__(self, tuning: Tuning) -> None:
        self._deviation = tuning.read_cost_deviation
        self.target = PerTokenCost(tuning)
        self.drafter = PerTokenCost(tuning)

    @property
    def drafter_seconds_per_token(self) -> float:
        """Seconds for the drafter to read a token: its own or the target's, whichever is smaller,
        as the target's estimate is always fresh. Until the drafter's is measured it is guessed to
        be the target's, and until the target's is, the drafter's."""
        target, drafter = self.target.seconds, self.drafter.seconds
        if not target or not drafter:
            return target or drafter
        return min(target, drafter)

    @property
    def measured_drafter_seconds_per_token(self) -> float:
        """`drafter_seconds_per_token`, but 0 until the drafter's reading has been measured: a guess
        must not rule out any K."""
        return self.drafter_seconds_per_token if self.drafter.seconds else 0.0

    def prompt_seconds(self, load: Load, drafting: bool) -> float:
        """Seconds of a step in which the target, and a drafter that runs, read its prompts."""
        per_token = self.target.seconds
        if drafting:
            per_token += self.measured_drafter_seconds_per_token
        return load.prefill_tokens * per_token

    def variance_beside(self, reading_s: float, rest_s: float) -> float:
        """Variance of the logarithm of `rest_s`: what is left of a step's seconds when those of its
        reading, which are an estimate, are subtracted."""
        return (self._deviation * reading_s / rest_s) ** 2
