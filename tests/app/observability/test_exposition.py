"""vLLM's counters over the lives of several engines."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from app.observability.exposition import Exposition


class FakeEngine:
    """Collectors as each engine registers them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        label = ["engine"]
        self.tokens = Counter("vllm:tokens", "Tokens.", label, registry=registry)
        self.running = Gauge("vllm:running", "Requests.", label, registry=registry)
        self.seconds = Histogram("vllm:s", "S.", label, registry=registry, buckets=(1, 2))

    def work(self, tokens: int, seconds: float) -> None:
        self.tokens.labels("0").inc(tokens)
        self.running.labels("0").set(tokens)
        self.seconds.labels("0").observe(seconds)

    def unregister(self) -> None:
        for collector in (self.tokens, self.running, self.seconds):
            self.registry.unregister(collector)


def read(exposition: Exposition) -> dict[str, float]:
    text = generate_latest(exposition).decode()
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)), "a family twice"
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name + sample.labels.get("le", "")
            assert key not in found, "a sample twice"
            found[key] = sample.value
    return found


def test_counters_go_on_and_gauges_begin_anew() -> None:
    registry = CollectorRegistry()
    other = Counter("aerie_other", "Ours.", registry=registry)
    other.inc(7)
    exposition = Exposition(registry)
    first = FakeEngine(registry)
    first.work(5, 0.5)
    alive = read(exposition)
    assert (alive["vllm:tokens_total"], alive["vllm:running"], alive["vllm:s_sum"]) == (5, 5, 0.5)

    exposition.retire(first.unregister)
    first.work(100, 100)  # a late word of the dead
    gap = read(exposition)
    assert (gap["vllm:tokens_total"], gap["vllm:running"], gap["vllm:s_sum"]) == (5, 0, 0.5)

    second = FakeEngine(registry)
    before_any_work = read(exposition)
    assert before_any_work["vllm:tokens_total"] == 5
    assert before_any_work["vllm:s_count"] == 1
    second.work(3, 1.5)
    third_of_life = read(exposition)
    assert third_of_life["vllm:tokens_total"] == 8
    assert third_of_life["vllm:running"] == 3
    assert [third_of_life[f"vllm:s_bucket{le}"] for le in ("1.0", "2.0", "+Inf")] == [1, 2, 2]
    assert third_of_life["vllm:s_sum"] == 2.0

    exposition.retire(second.unregister)
    FakeEngine(registry).work(1, 0.5)
    last = read(exposition)
    assert (last["vllm:tokens_total"], last["vllm:s_count"]) == (9, 3)
    assert last["aerie_other_total"] == 7
