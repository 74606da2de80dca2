"""Compute the figures of a run from its outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.load.events import Outcome

QUANTILES = (0.5, 0.9, 0.99)


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Tokens per second of all users and of one, and quantiles of times in milliseconds.

    `seconds` is from the first request sent to the last token, so that a run's tail counts.
    `user_tokens_per_second` is the median of 1 / TPOT over requests: how fast a user sees an answer
    grow. ITL is between chunks, which hold several tokens when drafts are accepted;
    `event_gap_ms` is between all events, those without text, such as the last one, included.
    """
    good = [item for item in outcomes if not item.failure]
    failures = sorted({item.failure for item in outcomes if item.failure})
    found: dict[str, Any] = {"requests": len(outcomes), "failed": len(outcomes) - len(good)}
    if failures:
        found["failures"] = failures[:3]
    if not good:
        return found
    seconds = max(item.last for item in good) - min(item.sent for item in outcomes)
    tokens = sum(item.tokens for item in good)
    tpots = [item.tpot for item in good if item.tpot is not None]
    users = sorted(1.0 / tpot for tpot in tpots if tpot > 0)
    chunks = sum(len(item.chunks) for item in good)
    return found | {
        "seconds": round(seconds, 4),
        "prompt_tokens": sum(item.prompt_tokens for item in good),
        "tokens": tokens,
        "chunks": chunks,
        "tokens_per_second": round(tokens / seconds, 2),
        "requests_per_second": round(len(good) / seconds, 3),
        "user_tokens_per_second": round(quantile(users, 0.5), 2) if users else None,
        "ttft_ms": quantiles([item.ttft for item in good]),
        "tpot_ms": quantiles(tpots),
        "itl_ms": quantiles([gap for item in good for gap in item.gaps]),
        "event_gap_ms": quantiles([gap for item in good for gap in item.event_gaps]),
        "e2e_ms": quantiles([item.e2e for item in good]),
    }


def steady(outcomes: Sequence[Outcome], users: int) -> dict[str, float]:
    """Tokens per second of a closed loop without its start and tail: from when all `users` had
    their first token until the first of them had no more requests. Empty if there is no such time,
    or if a request failed.

    In the tail the batch is not full, and its length depends on the method: requests of equal
    length end together if nothing is drafted, and one by one if drafts are accepted. Tokens are
    counted when they come; those of a request are assumed to be spread evenly over its chunks.
    """
    if len(outcomes) < users or any(item.failure or not item.chunks for item in outcomes):
        return {}
    begin = max(item.first for item in sorted(outcomes, key=lambda item: item.sent)[:users])
    end = sorted(item.last for item in outcomes)[len(outcomes) - users]
    return _between(outcomes, begin, end)


def steady_arrivals(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Tokens per second of an open loop without its start and tail: from when the first answer
    ended until the last request was sent. Empty if there is no such time. Requests that failed
    count for nothing.

    Until an answer has ended, fewer requests are running than will be; after the last arrival,
    ever fewer. A run's tokens over all of its time are too few by a third if answers take half as
    long as the arrivals.
    """
    good = [item for item in outcomes if not item.failure and item.chunks]
    if not good:
        return {}
    begin = min(good, key=lambda item: item.sent).last
    return _between(good, begin, max(item.sent for item in outcomes))


def _between(outcomes: Sequence[Outcome], begin: float, end: float) -> dict[str, float]:
    tokens = sum(
        item.tokens * sum(begin < chunk <= end for chunk in item.chunks) / len(item.chunks)
        for item in outcomes
    )
    if not tokens:  # or there is no such time
        return {}
    return {
        "steady_seconds": round(end - begin, 4),
        "steady_tokens_per_second": round(tokens / (end - begin), 2),
    }


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Mean and quantiles in milliseconds; empty if there are no values."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    found = {"mean": sum(ordered) / len(ordered)}
    found |= {f"p{100 * share:g}": quantile(ordered, share) for share in QUANTILES}
    return {name: round(1e3 * value, 3) for name, value in found.items()}


def quantile(ordered: Sequence[float], share: float) -> float:
    """Quantile `share` of values in ascending order, interpolated linearly."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
