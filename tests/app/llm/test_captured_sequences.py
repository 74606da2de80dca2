"""What is captured of vLLM's sequences, with its own output processor."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from app.llm.captured_sequences import MIN_ANSWER, captured_from, follow, take_steps
from app.llm.token_origins import record, watch
from drafters.config import HEAD, LOOKUP, REPORT_STEPS
from drafters.vllm.scheduling.request_steps import EVERY, RequestSteps
from drafters.vllm.scheduling.source_counts import RequestSourceCounts

PROMPT = [5, 6, 7]


def request(**changes: Any) -> EngineCoreRequest:
    params = SamplingParams(detokenize=False, output_kind=RequestOutputKind.DELTA)
    fields: dict[str, Any] = {
        "request_id": "r",
        "external_req_id": "r",
        "prompt_token_ids": PROMPT,
        "mm_features": None,
        "sampling_params": params,
        "pooling_params": None,
        "arrival_time": time.time(),
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
    }
    return EngineCoreRequest(**{**fields, **changes})


class Served:
    """A followed sequence, and the way of the engine core's outputs to it."""

    def __init__(self) -> None:
        self.processor = OutputProcessor(None, log_stats=False)
        self.queue = RequestOutputCollector(RequestOutputKind.DELTA, "r")
        self.request = request()
        self.processor.add_request(self.request, None, queue=self.queue)
        self.sequence = self.processor.request_states["r"]
        follow(self.request, self.sequence)

    def step(self, tokens: int, counts: Any = None, *, finished: bool = False) -> None:
        reason = FinishReason.LENGTH if finished else None
        output = EngineCoreOutput("r", [9] * tokens, finish_reason=reason)
        output.spec_decode_metrics = counts
        record([output], self.processor.request_states)
        take_steps([output], self.processor.request_states)
        self.processor.process_outputs([output])

    @property
    def counts(self) -> Any:
        """What the client's answer says of its drafts."""
        output = self.queue.get_nowait()
        return None if output is None else output.outputs[0].spec_decode_metrics  # type: ignore[union-attr]


@pytest.fixture
def served() -> Served:
    return Served()


def serve(served: Served, steps: Sequence[tuple[int, int]], *, finished: bool) -> None:
    """Serve steps as the scheduler sends them (drafters/vllm/scheduling/scheduler.py)."""
    unsent, metrics = RequestSteps(), RequestSpecDecodeMetrics.new(5)
    for number, (drafted, accepted) in enumerate(steps, 1):
        unsent.add(drafted, accepted)
        metrics.observe(drafted, accepted)
        last = finished and number == len(steps)
        served.step(1 + accepted, unsent.sent_with(metrics if last else None, last), finished=last)


def test_a_sequence_is_captured_with_its_steps(served: Served) -> None:
    assert served.request.sampling_params is not None
    assert served.request.sampling_params.extra_args == {REPORT_STEPS: 1}
    steps = [(0, 0), *[(5, 2), (3, 0), (0, 4)] * EVERY]
    serve(served, steps, finished=True)
    counts = served.counts
    assert (counts.per_step_drafted, counts.per_step_accepted) == ([], [])
    assert sum(counts.histogram) == len(steps)
    found = captured_from(served.sequence, "search", 3)
    assert found is not None
    assert (found.tenant, found.generation, list(found.prompt)) == ("search", 3, PROMPT)
    assert list(found.steps) == steps
    assert len(found.answer) == sum(1 + accepted for _, accepted in steps)
    assert abs(found.at - time.time()) < 60
    assert type(found).of_line(found.line()).steps == steps


def test_an_aborted_sequence_is_captured_as_far_as_it_got(served: Served) -> None:
    serve(served, [(5, 1)] * (EVERY + 3), finished=False)
    assert served.counts is None  # clients are told no sooner than without capture
    served.processor.abort_requests(["r"], internal=True)
    found = captured_from(served.sequence, "", 0)
    assert found is not None
    assert len(found.answer) == 2 * (EVERY + 3)
    assert list(found.steps) == [(5, 1)] * EVERY


def test_short_answers_are_not_captured(served: Served) -> None:
    served.step(MIN_ANSWER - 1)
    assert captured_from(served.sequence, "", 0) is None
    served.step(1)
    assert captured_from(served.sequence, "", 0) is not None


def test_steps_of_a_request_that_asks_for_its_tokens_come_from_their_log() -> None:
    served = Served()
    watch(served.sequence)
    sources, metrics = RequestSourceCounts(), RequestSpecDecodeMetrics.new(5)
    served.step(1)
    for number in range(8):
        source = LOOKUP if number % 2 else HEAD
        sources.add(source, 4, 3)
        metrics.observe(4, 3)
        served.step(4, sources.attached_to(metrics))
    found = captured_from(served.sequence, "", 0)
    assert found is not None
    assert list(found.steps) == [(0, 0), *[(4, 3), (0, 3)] * 4]


@pytest.mark.parametrize(
    "changes",
    [
        {"mm_features": [object()]},
        {"lora_request": object()},
        {"prompt_embeds": object(), "prompt_token_ids": None},
        {"prompt_embeds": object()},
        {"resumable": True},
        {"sampling_params": None},
        {"prompt_token_ids": []},
    ],
)
def test_what_the_head_cannot_be_trained_on_is_not_followed(changes: dict[str, Any]) -> None:
    asked, sequence = request(**changes), Served().sequence
    del sequence.aerie_captured_steps
    follow(asked, sequence)
    assert asked.sampling_params is None or not asked.sampling_params.extra_args
    assert captured_from(sequence, "", 0) is None


def test_sequences_that_are_not_followed_keep_their_outputs(served: Served) -> None:
    del served.sequence.aerie_captured_steps
    metrics = RequestSpecDecodeMetrics.new(5)
    metrics.observe(5, 2, detailed=True)
    served.step(3, metrics, finished=True)
    assert served.counts.per_step_drafted == [5]
    assert captured_from(served.sequence, "", 0) is None
