"""The stand-in counts as vLLM does, whatever ran in this process before it."""

from __future__ import annotations

import httpx
from prometheus_client import REGISTRY

from app.observability.exposition import EXPOSITION

from .stand_in import METRICS, StandInGateway


def test_it_counts_after_an_engine_of_this_process_has_ended() -> None:
    """Catches: counters that were registered once, and are gone with that engine's."""

    def unregister() -> None:
        for metric in METRICS:
            REGISTRY.unregister(metric)

    with StandInGateway():
        pass
    EXPOSITION.retire(unregister)
    with StandInGateway() as gateway:
        body = {"model": "aerie-embedded", "prompt": "a", "max_tokens": 8}
        httpx.post(f"{gateway.url}/v1/completions", json=body).raise_for_status()
    assert (REGISTRY.get_sample_value("vllm:generation_tokens_total") or 0) > 0
