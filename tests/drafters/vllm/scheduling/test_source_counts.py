"""Counts of a request's drafts by source, on their way to the gateway."""

from __future__ import annotations

from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from drafters.config import GRAMMAR, HEAD, LOOKUP
from drafters.vllm.scheduling.source_counts import RequestSourceCounts


def test_an_output_tells_what_each_source_has_made_so_far() -> None:
    counts, metrics = RequestSourceCounts(), RequestSpecDecodeMetrics.new(10)
    for source, drafts, accepted in ((HEAD, 3, 1), (LOOKUP, 8, 8), (GRAMMAR, 4, 4), (HEAD, 2, 0)):
        counts.add(source, drafts, accepted)
        metrics.observe(drafts, accepted)
    sent = counts.attached_to(metrics)
    assert sent.per_step_drafted == [5, 8, 4]
    assert sent.per_step_accepted == [1, 8, 4]
    assert (sent.num_draft_tokens, sent.histogram) == (17, metrics.histogram)


def test_what_is_sent_does_not_change_afterwards() -> None:
    counts, metrics = RequestSourceCounts(), RequestSpecDecodeMetrics.new(10)
    counts.add(LOOKUP, 8, 8)
    metrics.observe(8, 8)
    sent = counts.attached_to(metrics)
    counts.add(LOOKUP, 8, 8)
    metrics.observe(8, 8)
    assert (sent.per_step_drafted, sent.histogram[8]) == ([0, 8, 0], 1)
    assert metrics.per_step_drafted == []  # vLLM's own stays as it is
