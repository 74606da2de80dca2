"""The scheduler drafts forced spans: in the place of drafts that reach less far, within a request's
limit, and counted as what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from bench.simulate.fixed import Fixed
from drafters.config import GRAMMAR, REPORT_STEPS, REPORT_TOKENS, SOURCES
from drafters.control.policy import Step
from drafters.control.sources.draft_plan import DraftPlan
from drafters.vllm.scheduling.forced_spans import forced_text
from drafters.vllm.scheduling.limits import MAX_K
from drafters.vllm.scheduling.step_output import WorkerStepOutput
from tests.drafters.vllm.scheduler_harness import K_MAX, SchedulerHarness, configuration
from tests.drafters.vllm.scheduling.test_forced_spans import BYTES, COMPACT, TOKENIZER

ALWAYS = tuple(0.9 * n for n in range(K_MAX + 1))
SCHEMA = {
    "type": "object",
    "properties": {
        name: {"type": "boolean"} for name in ("is_verified_customer", "street_address_found")
    },
    "required": ["is_verified_customer", "street_address_found"],
    "additionalProperties": False,
}


def answer_of(matcher: Any) -> str:
    """The text that SCHEMA allows, with the value true: white space is the backend's affair."""
    text = ""
    while not matcher.is_completed():
        piece = forced_text(matcher) or "t"
        assert matcher.accept_string(piece)
        text += piece
    return text


ANSWER = answer_of(COMPACT.answer({"json": SCHEMA}).structured_output_request.grammar.matcher)


class Planning(Fixed):
    """Says what spans gain, and keeps what it is told of steps."""

    def __init__(self, spans: tuple[float, ...]) -> None:
        super().__init__(0, K_MAX)
        self.steps: list[Step] = []
        self._plan = DraftPlan((), spans=spans)

    def plan(self) -> DraftPlan:
        return self._plan

    def observe(self, step: Step) -> None:
        self.steps.append(step)


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return configuration()


class Served:
    """One request with a grammar, whose target answers with ANSWER; `spans` says what they gain."""

    def __init__(
        self, config: VllmConfig, spans: tuple[float, ...] = ALWAYS, *,
        limit: int | None = None, reported: str = REPORT_TOKENS,
    ) -> None:  # fmt: skip
        self.harness = harness = SchedulerHarness(config, seed=1, window=6, blocks=120)
        self.scheduler = harness.scheduler
        self.scheduler.k_policy = self.policy = Planning(spans)
        self.scheduler.structured_output_manager.tokenizer = TOKENIZER
        self.left = TOKENIZER.encode(ANSWER, add_special_tokens=False)
        extra: dict[str, Any] = {reported: True} | ({} if limit is None else {MAX_K: limit})
        params = SamplingParams(
            max_tokens=len(self.left), ignore_eos=True, extra_args=extra,
            structured_outputs=StructuredOutputsParams(json_object=True),
        )  # fmt: skip
        self.request = Request("r", [5, 6, 7], params, None, block_hasher=harness.hasher)
        grammar = COMPACT.answer({"json": SCHEMA}).structured_output_request.grammar
        assert self.request.structured_output_request is not None
        self.request.structured_output_request.grammar = cast("Any", grammar)
        self.scheduler.add_request(self.request)
        self.drafted: list[list[int]] = []
        self.outputs: list[Any] = []

    def run(self, drafts: Callable[[list[int]], list[int]] | None = None) -> None:
        """Make the whole answer; the worker drafts `drafts` of the tokens that are left."""
        while self.left:
            scheduled = self.scheduler.schedule()
            offered = scheduled.scheduled_spec_decode_tokens.get("r", [])
            self.drafted.append(offered)
            right = 0
            while right < len(offered) and offered[right] == self.left[right]:
                right += 1
            made, self.left = self.left[: right + 1], self.left[right + 1 :]
            output = ModelRunnerOutput(["r"], {"r": 0}, [made])
            if drafts is not None:
                WorkerStepOutput(DraftTokenIds(["r"], [drafts(self.left)])).attach(output)
            for client in self.scheduler.update_from_output(scheduled, output).values():
                self.outputs += client.outputs
        self.scheduler.recorder.tell(self.policy)


def test_spans_are_drafted_and_counted_as_the_grammars(config: VllmConfig) -> None:
    served = Served(config)
    tokens = len(served.left)
    served.run()
    assert len(served.drafted) < 0.6 * tokens, "the answer took few steps"
    found = [each for step in served.policy.steps for each in step.others]
    assert {each.source for each in found} == {GRAMMAR}
    accepted = sum(sum(each.accepted) for each in found)
    assert accepted == tokens - len(served.drafted)
    assert all(not sum(step.drafted) for step in served.policy.steps), "none is the head's"
    spans = [span for step in served.policy.steps for span in step.spans]
    assert spans and all(span.equal == span.compared for span in spans)
    counts = served.outputs[-1].spec_decode_metrics
    place = SOURCES.index(GRAMMAR)
    assert counts.per_step_accepted[place] == sum(counts.per_step_accepted) == accepted


@pytest.mark.parametrize("limit", [0, 2])
def test_a_request_keeps_its_limit(config: VllmConfig, limit: int) -> None:
    served = Served(config, limit=limit)
    served.run()
    assert max(map(len, served.drafted)) == limit


def test_where_spans_do_not_gain_none_is_drafted_and_all_are_looked_at(config: VllmConfig) -> None:
    served = Served(config, (0.0, *(-1.0 for _ in range(K_MAX))))
    served.run()
    assert not any(served.drafted)
    assert any(step.spans for step in served.policy.steps)


def in_bytes(left: list[int]) -> list[int]:
    """The text of the next tokens, a byte each."""
    text = b"".join(BYTES[token] for token in left)
    return [BYTES.index(bytes([byte])) for byte in text[:K_MAX]]


def test_drafts_that_reach_as_far_as_a_span_stay(config: VllmConfig) -> None:
    """The head knows better how the target cuts the same text into tokens."""
    served = Served(config)
    served.run(drafts=in_bytes)
    assert all(len(drafts) == K_MAX for drafts in served.drafted[1:-2])
    assert not any(step.others for step in served.policy.steps)
    assert sum(sum(step.drafted) for step in served.policy.steps) > 0


def test_a_span_takes_the_place_of_drafts_that_the_grammar_cut(config: VllmConfig) -> None:
    """They count neither for the head nor against it."""
    served = Served(config)
    served.run(drafts=lambda left: TOKENIZER.encode("{{{", add_special_tokens=False))
    spans = Served(config)
    spans.run()
    assert served.drafted == spans.drafted
    by_head = [step.drafted for step in served.policy.steps if step.others]
    assert by_head and not any(map(sum, by_head))


def test_requests_that_ended_are_forgotten(config: VllmConfig) -> None:
    served = Served(config)
    served.run()
    forced = served.scheduler._forced
    assert forced is not None and forced._is_short
    served.harness.arrive(prompt=3, most=1)
    served.scheduler.schedule()
    assert not forced._is_short and not forced._ahead


def test_a_captured_request_has_its_steps_sent_once(config: VllmConfig) -> None:
    """Spans are another source's: of the head there are 0 drafts in those steps."""
    served = Served(config, reported=REPORT_STEPS)
    served.run()
    told = [counts for each in served.outputs if (counts := each.spec_decode_metrics) is not None]
    assert len(told) < len(served.outputs)
    assert all(not counts.histogram for counts in told[:-1])
    steps = [
        step
        for counts in told
        for step in zip(counts.per_step_drafted, counts.per_step_accepted, strict=True)
    ]
    made = [len(output.new_token_ids) for output in served.outputs]
    assert steps == [(0, tokens - 1) for tokens in made]
    head = Served(config, reported=REPORT_STEPS)
    head.run(drafts=in_bytes)
    drafted = [n for each in head.outputs if each.spec_decode_metrics is not None
               for n in each.spec_decode_metrics.per_step_drafted]  # fmt: skip
    assert drafted == list(map(len, head.drafted))
    assert sum(drafted) > 0
