"""Counts of a request's drafts by source, on their way to the gateway."""

from __future__ import annotations

from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from drafters.config import GRAMMAR, HEAD, LOOKUP
from drafters.vllm.scheduling.source_counts import RequestSourceCounts


def test_an_output_tells_what_each_source_has_made_so_far() -> None:
    """And does not change afterwards, as another thread sends it."""
    counts, metrics = RequestSourceCounts(), RequestSpecDecodeMetrics.new(10)
    for source, drafts, accepted in ((HEAD, 3, 1), (LOOKUP, 8, 8), (GRAMMAR, 4, 4), (HEAD, 2, 0)):
        counts.add(source, drafts, accepted)
        metrics.observe(drafts, accepted)
    sent, histogram = counts.attached_to(metrics), list(metrics.histogram)
    counts.add(LOOKUP, 8, 8)
    metrics.observe(8, 8)
    assert sent.per_step_drafted == [5, 8, 4]
    assert sent.per_step_accepted == [1, 8, 4]
    assert (sent.num_draft_tokens, sent.histogram) == (17, histogram)
    assert metrics.per_step_drafted == []  # vLLM's own stays as it is
