"""vLLM's metrics on /metrics, kept across restarts of the engine.

Each engine registers collectors of its own and unregisters those of the one before, so that its
counters begin at zero. `Exposition` adds what earlier engines counted: no counter falls at a
restart, and all of them stay while there is no engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from prometheus_client import REGISTRY, disable_created_metrics
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_COUNTING = ("counter", "histogram", "summary")
_Key = tuple[str, tuple[tuple[str, str], ...]]

# The `_created` series: a quarter of all lines, which Prometheus keeps as gauges and nobody reads.
disable_created_metrics()


class Exposition(Collector):
    """The metrics of `source`; those of vLLM are kept across engines."""

    def __init__(self, source: Collector = REGISTRY) -> None:
        self._source = source
        self._past: dict[str, Metric] = {}
        self._counts: dict[_Key, float] = {}
        self._exclusive = threading.Lock()  # a scrape runs in a thread of its own

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family once, earlier engines' counts included."""
        with self._exclusive:
            return iter(self._collect())

    def retire(self, unregister: Callable[[], None]) -> None:
        """Keep the counts of an engine that has ended, and unregister its collectors.

        Its gauges are 0 until there is another engine.
        """
        with self._exclusive:
            past = {f.name: f for f in self._collect() if f.name.startswith("vllm:")}
            unregister()
            self._counts = {
                _key(sample): sample.value
                for family in past.values()
                if family.type in _COUNTING
                for sample in family.samples
            }
            for family in past.values():
                if family.type == "gauge":
                    family.samples = [sample._replace(value=0.0) for sample in family.samples]
            self._past = past

    def _collect(self) -> list[Metric]:
        families = [self._lasting(family) for family in self._source.collect()]
        present = {family.name for family in families}
        return families + [family for name, family in self._past.items() if name not in present]

    def _lasting(self, family: Metric) -> Metric:
        past = self._past.get(family.name)
        if past is None or family.type not in _COUNTING:
            return family
        whole = Metric(family.name, family.documentation, family.type, family.unit)
        present = {_key(sample): sample for sample in family.samples}
        before = self._counts.get
        whole.samples = [
            Sample(one.name, one.labels, one.value + before(key, 0.0))
            for key, one in present.items()
        ]
        whole.samples += [sample for sample in past.samples if _key(sample) not in present]
        return whole


def _key(sample: Sample) -> _Key:
    return sample.name, tuple(sample.labels.items())  # a metric's labels are always in one order


EXPOSITION = Exposition()
