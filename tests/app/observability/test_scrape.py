"""The text of a scrape: what the client library writes, for less."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Enum,
    Gauge,
    Histogram,
    Info,
    Summary,
    generate_latest,
)

from app.observability import scrape
from app.observability.exposition import Exposition

# As many as a gateway has: /metrics of the embedded model is 550 lines.
HISTOGRAMS, COUNTERS, BUCKETS = 18, 60, 22
# Of the client library's time, which is 7 ms where this was written: wanted is a scrape within 20.
MOST_OF_THEIRS = 2.0


def everything() -> CollectorRegistry:
    registry = CollectorRegistry()
    odd = Counter("odd", 'Back\\slash,\nnew line, "quote".', ["z", "a"], registry=registry)
    odd.labels('say "hi"\n', "back\\slash").inc(3)
    odd.labels("ümläut", "").inc(12345678.5)
    values = Gauge("values", "Of every kind.", ["of"], registry=registry)
    for value in (0, -1.5, 1e-9, 1e9, 1e300, math.inf, -math.inf, math.nan):
        values.labels(repr(value)).set(value)
    Gauge("bare", "Without labels.", registry=registry).set(7)
    Histogram("seconds", "In buckets.", ["x"], buckets=(0.5, 1, 2.5e6), registry=registry).labels(
        "y"
    ).observe(3)
    Summary("sums", "Count and sum.", registry=registry).observe(2)
    Info("build", "Named so.", registry=registry).info({"version": "1"})
    Enum("state", "One of some.", states=["on", "off"], registry=registry).state("off")
    Counter("empty", "No series yet.", ["label"], registry=registry)
    return registry


def test_it_is_what_the_client_library_writes() -> None:
    registry = everything()
    assert scrape.text(registry).decode() == generate_latest(registry).decode()


def test_a_second_scrape_has_new_values() -> None:
    """Of a line, only what never changes is remembered."""
    registry = CollectorRegistry()
    made = Counter("made", "Made.", ["kind"], registry=registry)
    made.labels("a").inc()
    assert b'made_total{kind="a"} 1.0\n' in scrape.text(registry)
    made.labels("a").inc()
    made.labels("b").inc(5)
    assert b'made_total{kind="a"} 2.0\nmade_total{kind="b"} 5.0\n' in scrape.text(registry)


class Page:
    """The metrics of a gateway whose engine has been started a second time."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.exposition = Exposition(self.registry)
        first = self.engine()
        self.exposition.retire(lambda: [self.registry.unregister(one) for one in first])
        self.engine()

    def engine(self) -> list[Counter | Histogram]:
        labels = ["engine", "model_name"]
        made: list[Counter | Histogram] = []
        for number in range(HISTOGRAMS):
            bounds = [0.01 * 1.5**i for i in range(BUCKETS)]
            name = f"vllm:seconds{number}"
            made.append(Histogram(name, "S.", labels, buckets=bounds, registry=self.registry))
        for number in range(COUNTERS):
            made.append(Counter(f"vllm:count{number}", "C.", labels, registry=self.registry))
        for one in made:
            child = one.labels("0", "the-model")
            child.inc() if isinstance(child, Counter) else child.observe(0.2)
        return made


def cpu_s(*works: Callable[[], bytes], times: int = 40) -> list[float]:
    """The least of some tries of each: what it takes, whoever else is on this core. They take
    turns, so that a core slow for a while is slow for all."""
    tries: list[list[float]] = [[] for _ in works]
    for _ in range(times):
        for work, taken in zip(works, tries, strict=True):
            began = time.thread_time()
            work()
            taken.append(time.thread_time() - began)
    return [min(taken) for taken in tries]


def test_a_scrape_is_cheap() -> None:
    """It is pure Python under one lock: while it runs, no stream goes on. Walking the registry
    twice, or escaping every label in every scrape, is what this is to notice."""
    page = Page()
    assert scrape.text(page.exposition).count(b"\n") > 600
    whole, ours, theirs = cpu_s(
        partial(scrape.text, page.exposition),
        partial(scrape.text, page.registry),
        partial(generate_latest, page.registry),
    )
    assert whole < MOST_OF_THEIRS * theirs, f"{whole * 1e3:.1f} ms of {theirs * 1e3:.1f}"
    assert ours < 0.75 * theirs, f"{ours * 1e3:.2f} ms, the library {theirs * 1e3:.2f} ms"
