"""Averages over recent steps, and the drafter's backlog."""

from __future__ import annotations

import math

from drafters.control.policy import Step
from drafters.control.tuning import Tuning


class Traffic:
    """Prompt and output tokens of recent steps, and the tokens that the drafter has not read."""

    def __init__(self, catch_up_tokens: int, tuning: Tuning) -> None:
        self._catch_up_tokens = catch_up_tokens  # per request, that the drafter reads at most
        self._memory_steps = tuning.traffic_memory_steps
        self._steps = 0
        self._settling_s = tuning.settling_s
        self.prompt_tokens = 0.0  # of a step, averaged
        self.output_tokens = 0.0  # of a step, averaged
        self.unread_tokens_per_request = 0.0  # that the drafter has not read
        self.seconds_without_drafts = math.inf  # since a step made or verified drafts

    @property
    def is_settled(self) -> bool:
        """Whether the last drafts are `settling_s` seconds ago. Before that a plain step is slower
        than others at K = 0."""
        return self.seconds_without_drafts >= self._settling_s

    def average(self, step: Step) -> None:
        """Add a step to the averages: of all steps at first, and then of about `memory_steps`."""
        self._steps += 1
        weight = 1.0 / min(self._steps, self._memory_steps)
        self.prompt_tokens += weight * (step.load.prefill_tokens - self.prompt_tokens)
        self.output_tokens += weight * (step.tokens - self.output_tokens)

    def update_backlog(self, step: Step) -> None:
        """Update after a step what the drafter has not read, and how long ago the last drafts were
        made or verified."""
        load = step.load
        drafts = load.draft_tokens or load.draft_tokens_at(step.k) or step.looked_up
        self.seconds_without_drafts += step.seconds
        if drafts:
            self.seconds_without_drafts = 0.0
        if step.k:
            self.unread_tokens_per_request = 0.0
            return
        requests = max(1, load.requests)
        new = (step.tokens + load.prefill_tokens) / requests
        context = load.context_tokens / requests + 1.0
        unread = self.unread_tokens_per_request + new
        self.unread_tokens_per_request = min(self._catch_up_tokens, context, unread)
