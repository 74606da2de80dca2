"""The true cost of a simulated engine's step: a roofline, unlike the controller's own terms."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hardware:
    """Seconds; a mixture of experts reads those that its tokens touch, a dense model all."""

    base: float  # of every step: launches, attention, dense weights
    request: float  # per request: scheduling, sampling, its KV cache
    experts: float  # to read every expert's weights once; 0: no mixture
    touched: float  # share of the experts that one token needs
    token: float  # compute per token
    drafter: float  # of every drafter pass
    drafter_token: float  # per token that a drafter pass makes, or reads to catch up
    parallel: bool = True  # one pass for all K drafts (P-EAGLE), or one for each (EAGLE-3)
    context: float = 0.0  # per token in the KV cache

    def target(self, requests: int, tokens: int, context: int = 0) -> float:
        """One forward pass over `tokens` of decoding requests and prompts."""
        if tokens == 0:
            return 0.0
        memory = self.experts * (1.0 - (1.0 - self.touched) ** tokens)
        compute = self.token * tokens
        return self.base + self.request * requests + self.context * context + max(memory, compute)

    def draft(self, requests: int, k: int, unseen: int = 0) -> float:
        """K drafts for each request, after reading `unseen` tokens that were skipped."""
        if k == 0 or requests + unseen == 0:
            return 0.0
        if self.parallel:
            return self.drafter + self.drafter_token * (requests * k + unseen)
        return k * (self.drafter + self.drafter_token * requests) + self.drafter_token * unseen

    def steady(self, requests: int, k: int) -> float:
        """A step that verifies K drafts of every request and makes K more."""
        return self.target(requests, requests * (1 + k)) + self.draft(requests, k)

    def rate(self, requests: int, k: int, survival: list[float]) -> float:
        """Tokens per second at a fixed K, exactly: what a long run comes to."""
        return requests * (1.0 + sum(survival[:k])) / self.steady(requests, k)
