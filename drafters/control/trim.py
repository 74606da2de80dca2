"""Requests differ: how many drafts each is worth, when one more costs the whole batch time."""

from __future__ import annotations

from collections.abc import Sequence


def trim(
    survival: Sequence[Sequence[float]],  # [requests][positions]: chance that a draft is accepted
    base_s: float,  # of a step without any draft
    draft_s: float,  # that one more draft adds
) -> list[int]:
    """Drafts for each request that make the most tokens per second: [requests].

    A draft is worth its time if it is accepted more often than the batch would make tokens in
    that time. Chances fall along a request, so taking drafts in order of their chance never
    takes one without those before it.
    """
    counts = [0] * len(survival)
    tokens, seconds = float(len(survival)), base_s
    offers = sorted(
        ((chance, request) for request, row in enumerate(survival) for chance in row), reverse=True
    )
    for chance, request in offers:
        if chance * seconds <= draft_s * tokens:
            break
        counts[request] += 1
        tokens += chance
        seconds += draft_s
    return counts
