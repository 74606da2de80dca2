"""What forced spans are worth, learnt from how far answers kept to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from drafters.control.acceptance import Acceptance
from drafters.control.policy import Step
from drafters.control.tuning import Tuning


class SpanGains:
    """The gains of forced spans by number of tokens.

    A grammar leaves no choice about the text of a span, but the target may cut it into other
    tokens. Every span is compared with the tokens that came, drafted or not. So it is known what
    spans are worth while none is drafted.
    """

    def __init__(self, max_span_tokens: int, tuning: Tuning) -> None:
        """`max_span_tokens` is the most draft tokens of a span."""
        prior = replace(tuning, prior_acceptance=tuning.prior_span_acceptance)
        self._acceptance = Acceptance(max_span_tokens, prior)

    def observe(self, step: Step) -> None:
        """Learn from the spans that the tokens of a step were compared with."""
        if step.spans:
            comparisons = [(span.compared, span.equal) for span in step.spans]
            self._acceptance.observe_comparisons(comparisons)

    def gains(self, prices: Sequence[float]) -> tuple[float, ...]:
        """What drafting the first n tokens of a span gains, in tokens, by n: [max_span_tokens + 1].
        `prices[n]` is the tokens that the batch would make in the time of verifying n."""
        expected = accumulate(self._acceptance.survival(), initial=0.0)
        return tuple(right - price for right, price in zip(expected, prices, strict=False))

    def row(self) -> dict[str, Any]:
        """A row of the state: how often the first token was right, and the mean number that the
        longest span would have right."""
        survival = self._acceptance.survival()
        return {
            "conditional": survival[0] if survival else 0.0,
            "tokens": sum(survival),
            "trials": self._acceptance.observed_trials[0] if survival else 0.0,
        }
