"""A policy with a fixed K."""

from __future__ import annotations

from drafters.control.objective import Objective
from drafters.control.policy import Load, Step


class Fixed:
    """The policy of a fixed K, which may be set between steps."""

    max_unobserved_steps = 1

    def __init__(self, k: int, k_max: int) -> None:
        self._k_max = k_max
        self.k = k

    @property
    def k_max(self) -> int:
        """The largest K that may be set."""
        return self._k_max

    @property
    def k_limit(self) -> int:
        """The largest K in use: the fixed one."""
        return self._k

    @property
    def k(self) -> int:
        """Draft tokens per request; may be set between steps."""
        return self._k

    @k.setter
    def k(self, value: int) -> None:
        Objective("fixed", k=value).validated_for(self._k_max)
        self._k = value

    def choose(self, load: Load) -> int:
        """The fixed K, at every load."""
        return self._k

    def observe(self, step: Step) -> None:
        """Learn nothing from a step."""

    def plan(self) -> None:
        """The head alone drafts."""
