"""What drafts by request (Spread) gain over one K for all, on batches of code and prose."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from drafters.control.simulate.curve import geometric
from drafters.control.simulate.hardware import Hardware
from drafters.control.spread import Spread

CODE, PROSE = geometric(0.85, 0.85), geometric(0.5, 0.5)
OUTPUT = 128  # tokens of a request: its own acceptance has to be learned within them
REQUESTS = 400  # of which so many are answered


@dataclass(frozen=True, slots=True)
class Gain:
    """Tokens per second over those of the best K for all."""

    requests: int
    known: float  # every request's acceptance is known, and what one more draft costs
    learned: float  # by Spread, at the K near the best for all that is best with it


@dataclass(slots=True)
class _Request:
    name: str
    survival: list[float]
    left: int = OUTPUT


def gain(hardware: Hardware, requests: int, k_max: int, seed: int) -> Gain:
    """Half code, half prose."""
    curves = [CODE if i % 2 == 0 else PROSE for i in range(requests)]
    uniform = [
        sum(1.0 + sum(curve[:k]) for curve in curves) / hardware.steady(requests, k)
        for k in range(k_max + 1)
    ]
    best = max(range(k_max + 1), key=uniform.__getitem__)
    known = max(_best(hardware, curves, k_max), uniform[best]) / uniform[best]
    near = {min(k_max, max(1, best + step)) for step in (-1, 0, 1)}
    learned = max(_learned(hardware, requests, k, k_max, random.Random(seed)) for k in near)
    return Gain(requests, known, max(1.0, learned) if best else 1.0)


def _best(hardware: Hardware, curves: list[list[float]], k_max: int) -> float:
    """The likeliest draft of the batch first, while it makes tokens faster than the batch does."""
    offers = sorted((chance for curve in curves for chance in curve[:k_max]), reverse=True)
    made, rate = float(len(curves)), 0.0
    for drafts, chance in enumerate(offers, 1):
        made += chance
        rate = max(rate, made / _seconds(hardware, len(curves), drafts))
    return rate


def _learned(hardware: Hardware, requests: int, k: int, k_max: int, rng: random.Random) -> float:
    """Over the best K for all on the same batches."""
    spread, arriving = Spread(k_max), _arriving(rng)
    running = [next(arriving) for _ in range(requests)]
    for request in running:  # in the middle of their lives
        request.left = rng.randint(1, OUTPUT)
    tokens, seconds, answered, steps = 0.0, 0.0, 0, 0
    uniform = [0.0] * (k_max + 1)  # tokens at each K for all
    while answered < REQUESTS:
        shares = spread.share(k, [request.name for request in running])
        drafts = [shares.get(request.name, k) for request in running]
        seconds += _seconds(hardware, requests, sum(drafts))
        steps += 1
        for i, (request, own) in enumerate(zip(running, drafts, strict=True)):
            tokens += 1.0 + sum(request.survival[:own])
            for n in range(k_max + 1):
                uniform[n] += 1.0 + sum(request.survival[:n])
            hits = bisect_left(request.survival, -rng.random(), hi=own, key=float.__neg__)
            spread.observe(request.name, own, hits)
            request.left -= hits + 1
            if request.left <= 0:
                running[i] = next(arriving)
                answered += 1
        spread.keep({request.name for request in running})
    rates = [made / steps / hardware.steady(requests, n) for n, made in enumerate(uniform)]
    return tokens / seconds / max(rates)


def _arriving(rng: random.Random) -> Iterator[_Request]:
    for number in count():
        yield _Request(str(number), CODE if rng.random() < 0.5 else PROSE)


def _seconds(hardware: Hardware, requests: int, drafts: int) -> float:
    """Any number of drafts per request, in the drafter's pass and in the target's."""
    drafter = hardware.drafter + hardware.drafter_token * drafts
    return hardware.target(requests, requests + drafts) + drafter
