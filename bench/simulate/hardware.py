"""The true cost of a simulated engine's step: a roofline, other than the controller's model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hardware:
    """The costs of a machine and model, in seconds. A mixture of experts reads the experts that its
    tokens need, a dense model all of its weights."""

    base: float  # of every step: launches, attention, dense weights
    request: float  # per request: scheduling, sampling, its KV cache
    experts: float  # to read the weights of all experts once; 0 for a dense model
    touched: float  # share of the experts that one token needs
    token: float  # compute per token
    drafter: float  # of every drafter pass
    drafter_token: float  # per token that a drafter pass makes, or reads to catch up
    parallel: bool = True  # one pass for all K drafts (P-EAGLE), or one for each (EAGLE-3)
    context: float = 0.0  # per token in the KV cache

    def target(self, requests: int, tokens: int, context: int = 0) -> float:
        """Seconds of a forward pass over `tokens` of decoding requests and prompts."""
        if tokens == 0:
            return 0.0
        memory = self.experts * (1.0 - (1.0 - self.touched) ** tokens)
        compute = self.token * tokens
        return self.base + self.request * requests + self.context * context + max(memory, compute)

    def draft(self, requests: int, k: int, unseen: int = 0) -> float:
        """Seconds to draft K tokens for each request, and to read `unseen` tokens before that."""
        if k == 0 or requests + unseen == 0:
            return 0.0
        if self.parallel:
            return self.drafter + self.drafter_token * (requests * k + unseen)
        return k * (self.drafter + self.drafter_token * requests) + self.drafter_token * unseen

    def steady(self, requests: int, k: int) -> float:
        """Seconds of a step that verifies K drafts of every request and makes K more."""
        return self.target(requests, requests * (1 + k)) + self.draft(requests, k)

    def rate(self, requests: int, k: int, survival: list[float]) -> float:
        """Expected tokens per second at a fixed K, which a long run approaches."""
        return requests * (1.0 + sum(survival[:k])) / self.steady(requests, k)
