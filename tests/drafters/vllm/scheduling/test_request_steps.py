"""The steps of a captured request: sent together, each once, in their order."""

from __future__ import annotations

from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from drafters.vllm.scheduling.request_steps import EVERY, RequestSteps


def test_each_step_is_sent_once_and_most_outputs_have_none() -> None:
    steps, drafted, sent = RequestSteps(), [], 0
    for number in range(3 * EVERY + 5):
        steps.add(number, number % 3)
        counts = steps.sent_with(None, number == 3 * EVERY + 4)
        if counts is not None:
            sent += 1
            assert counts.histogram == []  # which says that there are no counts
            drafted += counts.per_step_drafted
            assert counts.per_step_accepted == [step % 3 for step in counts.per_step_drafted]
    assert drafted == list(range(3 * EVERY + 5))
    assert sent == 4


def test_counts_that_are_sent_anyway_take_the_steps_along_and_stay_as_they_are() -> None:
    steps, counts = RequestSteps(), RequestSpecDecodeMetrics.new(5)
    counts.observe(4, 2)
    steps.add(4, 2)
    sent = steps.sent_with(counts, False)
    assert sent is not None
    counts.observe(5, 5)
    assert (sent.per_step_drafted, sent.per_step_accepted) == ([4], [2])
    assert (sent.num_draft_tokens, sum(sent.histogram)) == (4, 1)
    assert counts.per_step_drafted == []
