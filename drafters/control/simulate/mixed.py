"""What a K for each request gains over one K for all, on batches of code and prose."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from drafters.control.simulate.curve import geometric
from drafters.control.simulate.hardware import Hardware
from drafters.control.trim import trim

CODE, PROSE = geometric(0.85, 0.85), geometric(0.5, 0.5)
OUTPUT = 128  # tokens of a request: its own acceptance has to be learned within them
PRIOR, PRIOR_TRIALS = 0.7, 16.0
REQUESTS = 400  # of which so many are answered


@dataclass(frozen=True, slots=True)
class Gain:
    """Tokens per second over those of the best K for all."""

    requests: int
    known: float  # every request's acceptance is known
    learned: float  # it is learned from the request's own drafts, if any K > 0 is worth it
    verified_only: float  # known; all are drafted alike, only what is verified is trimmed


@dataclass(slots=True)
class _Request:
    survival: list[float]
    left: int = OUTPUT
    hits: float = PRIOR * PRIOR_TRIALS
    trials: float = PRIOR_TRIALS


def gain(hardware: Hardware, requests: int, k_max: int, seed: int) -> Gain:
    """Half code, half prose."""
    curves = [CODE if i % 2 == 0 else PROSE for i in range(requests)]
    uniform = max(
        sum(1.0 + sum(curve[:k]) for curve in curves) / hardware.steady(requests, k)
        for k in range(k_max + 1)
    )
    known = max(_ragged(hardware, curves, k_max), uniform)
    cuts = [_cut(hardware, curves, k) for k in range(1, k_max + 1)]
    learned = _learned(hardware, requests, k_max, random.Random(seed))
    return Gain(requests, known / uniform, learned, max(uniform, *cuts) / uniform)


def _ragged(hardware: Hardware, curves: list[list[float]], k_max: int) -> float:
    counts = trim([curve[:k_max] for curve in curves], *_prices(hardware, len(curves), k_max))
    made = sum(1.0 + sum(curve[:k]) for curve, k in zip(curves, counts, strict=True))
    return made / _seconds(hardware, len(curves), sum(counts))


def _cut(hardware: Hardware, curves: list[list[float]], k: int) -> float:
    """K drafts for everyone, of which the likeliest are verified."""
    requests = len(curves)
    base = hardware.target(requests, requests) + hardware.draft(requests, k)
    wide = hardware.target(requests, requests * (1 + k)) + hardware.draft(requests, k)
    counts = trim([curve[:k] for curve in curves], base, (wide - base) / (requests * k))
    made = sum(1.0 + sum(curve[:n]) for curve, n in zip(curves, counts, strict=True))
    return made / (hardware.target(requests, requests + sum(counts)) + hardware.draft(requests, k))


def _learned(hardware: Hardware, requests: int, k_max: int, rng: random.Random) -> float:
    """Over the best K for all on the same batches."""
    prices = _prices(hardware, requests, k_max)
    arriving = _arriving(rng)
    running = [next(arriving) for _ in range(requests)]
    for request in running:  # in the middle of their lives
        request.left = rng.randint(1, OUTPUT)
    tokens, seconds, answered, steps = 0.0, 0.0, 0, 0
    uniform = [0.0] * (k_max + 1)  # tokens at each K for all
    while answered < REQUESTS:
        rates = [request.hits / request.trials for request in running]
        counts = trim([geometric(rate, rate)[:k_max] for rate in rates], *prices)
        seconds += _seconds(hardware, requests, sum(counts))
        steps += 1
        for i, (request, k) in enumerate(zip(running, counts, strict=True)):
            tokens += 1.0 + sum(request.survival[:k])
            for n in range(k_max + 1):
                uniform[n] += 1.0 + sum(request.survival[:n])
            hits = bisect_left(request.survival, -rng.random(), hi=k, key=float.__neg__)
            request.hits += hits
            request.trials += min(hits + 1, k)
            request.left -= hits + 1
            if request.left <= 0:
                running[i] = next(arriving)
                answered += 1
    rates = [made / steps / hardware.steady(requests, k) for k, made in enumerate(uniform)]
    return 1.0 if max(rates) == rates[0] else tokens / seconds / max(rates)


def _arriving(rng: random.Random) -> Iterator[_Request]:
    while True:
        yield _Request(CODE if rng.random() < 0.5 else PROSE)


def _prices(hardware: Hardware, requests: int, k_max: int) -> tuple[float, float]:
    """A step without drafts but with a drafter pass, and what one more draft adds."""
    base = _seconds(hardware, requests, 0)
    return base, (hardware.steady(requests, k_max) - base) / (requests * k_max)


def _seconds(hardware: Hardware, requests: int, drafts: int) -> float:
    """Any number of drafts per request, in the drafter's pass and in the target's."""
    drafter = hardware.drafter + hardware.drafter_token * drafts
    return hardware.target(requests, requests + drafts) + drafter
