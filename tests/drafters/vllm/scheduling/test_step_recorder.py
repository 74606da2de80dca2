"""Steps as the policy observes them: their times, and how many drafts were accepted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from drafters.config import GRAMMAR, HEAD, LOOKUP
from drafters.control.policy import Load, Match, Policy, SourceCounts, Step
from drafters.vllm.scheduling import step_recorder
from drafters.vllm.scheduling.step_output import WorkerStepOutput
from drafters.vllm.scheduling.step_recorder import StepRecorder, load_of


def scheduled(k: int = 2, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(num_spec_tokens_to_schedule=k, **fields)


def ran(*tokens: list[int]) -> SimpleNamespace:
    return SimpleNamespace(sampled_token_ids=list(tokens))


def told_by(recorder: StepRecorder) -> list[Step]:
    """The steps that a policy is told of."""
    told = list[Step]()
    recorder.tell(cast("Policy", SimpleNamespace(observe=told.append)))
    return told


def test_steps_are_told_in_order_with_their_own_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins, asynchronously, before the first has ended: it takes from then on."""
    times = iter([3.0, 3.5, 4.0, 4.0])
    monkeypatch.setattr(step_recorder, "perf_counter", lambda: next(times))
    recorder = StepRecorder(3)
    first, second = scheduled(), scheduled(k=0)
    recorder.begin(first, 1.0, Load(2))
    recorder.begin(second, 2.0, Load(1))
    recorder.verified("a", 3, 1)
    recorder.verified("b", 1, 1)
    recorder.end(first, ran([1, 2], [3, 4]))
    recorder.end(second, ran([5]))
    assert recorder.untold == 2
    told = told_by(recorder)
    assert recorder.untold == 0 and list(recorder.recent) == told
    assert [(s.load, s.k, s.seconds, s.tokens) for s in told] == [
        (Load(2), 2, 2.0, 4),
        (Load(1), 0, 1.0, 1),
    ]
    assert [(s.drafted, s.accepted) for s in told] == [((2, 1, 1), (2, 0, 0)), ((0,) * 3,) * 2]


def test_a_drafter_that_runs_behind_counts_in_its_own_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of 1 s of target and 0.25 s of drafter, whose tokens come after the target: outputs are
    1.25 s apart, but the second step read a prompt, which its drafter then read for 0.75 s. After
    the third the engine idles. The fault: the drafter's reading counted in the step behind it."""
    #          begun, ended; the fourth begins when the drafter of the third has ended
    times = [(0.0, 1.0), (0.5, 2.25), (1.5, 4.0), (9.0, 10.0)]
    drafted = [None, 0.25, 0.75, 0.25]  # of the step before
    ends = iter([at for _, end in times for at in (end, end)])
    monkeypatch.setattr(step_recorder, "perf_counter", lambda: next(ends))
    recorder = StepRecorder(3)
    for (begun, _), seconds in zip(times, drafted, strict=True):
        step, output = scheduled(), ran([1])
        recorder.begin(step, begun, Load(1))
        known = seconds is not None
        WorkerStepOutput(None, known * 1.0, seconds or 0.0, of_step_before=True).attach(output)
        recorder.end(step, output)
    told = told_by(recorder)
    assert [(s.seconds, s.target_seconds, s.draft_seconds) for s in told] == [
        (1.25, 1.0, 0.25),
        (1.75, 1.0, 0.75),
        (1.25, 1.0, 0.25),
    ]  # the last one's drafter is not known yet
    recorder.end(scheduled(), ran([1]))  # never begun
    assert recorder.untold == 0


def test_a_load_counts_prompts_and_limits_of_those_that_make_tokens() -> None:
    """One decodes with two drafts, one ends its prompt, one is within it and counts for neither."""
    requests = {
        "decodes": SimpleNamespace(num_computed_tokens=10, num_tokens=11),
        "ends": SimpleNamespace(num_computed_tokens=4, num_tokens=9),
        "reads": SimpleNamespace(num_computed_tokens=0, num_tokens=50),
    }
    step = scheduled(
        num_scheduled_tokens={"decodes": 3, "ends": 5, "reads": 8},
        scheduled_spec_decode_tokens={"decodes": [7, 7]},
        total_num_scheduled_tokens=16,
    )
    load = load_of(step, requests, {"ends": 1, "reads": 0}, 3)
    assert load == Load(
        requests=2, prefill_tokens=12, context_tokens=30, draft_tokens=2,
        requests_by_draft_limit=(2, 1, 1),
    )  # fmt: skip
    assert load_of(step, requests, {"reads": 0}, 3).requests_by_draft_limit == ()
    assert [load.cost_k(k) for k in range(4)] == [0, 1, 2, 2]
    padded = load_of(step, requests, {"ends": 1, "reads": 0}, 3, padded=True)
    assert padded == load._replace(padded=True)
    assert [padded.cost_k(k) for k in range(4)] == [0, 1, 2, 3]


def test_each_source_of_drafts_is_counted_for_itself() -> None:
    """Of four requests with the head's drafts, a lookup's, a grammar's, and a lookup's of which
    the grammar left none. The fault: the lookup that failed lowers the head's acceptance. With
    pipeline stages the next step has begun: all drafts were taken for those of its sources."""
    recorder = StepRecorder(2, 4)
    step, output = scheduled(k=2), ran([1], [2], [3], [4])
    recorder._cut_from_step = {"d": step_recorder._Cut(3, 0)}
    recorder.begin(step, 0.0, Load(4), {"b": LOOKUP, "c": GRAMMAR, "d": LOOKUP})
    recorder.begin(scheduled(k=2), 0.0, Load(1), {"e": LOOKUP})
    recorder.ends_next(step)
    assert [recorder.verified(*counts) for counts in (("a", 2, 1), ("b", 4, 0), ("c", 4, 4))] == [
        HEAD, LOOKUP, GRAMMAR,
    ]  # fmt: skip
    matches = (Match(7, 2, 2), Match(3, 1, 0))
    extras = WorkerStepOutput(head_k=0, looked_up=("a",), matches=matches, missed_tokens_read=9)
    extras.attach(output)
    recorder.end(step, output)
    told = told_by(recorder)
    assert (told[0].drafted, told[0].accepted) == ((1, 1), (1, 0))
    assert told[0].others == (
        SourceCounts(LOOKUP, (2, 2, 2, 1), (0, 0, 0, 0)),
        SourceCounts(GRAMMAR, (1, 1, 1, 1), (1, 1, 1, 1)),
    )
    # The worker skipped the head's pass although K = 2 was scheduled.
    assert (told[0].k, told[0].looked_up, told[0].matches) == (0, 1, matches)
    assert told[0].missed_tokens_read == 9
