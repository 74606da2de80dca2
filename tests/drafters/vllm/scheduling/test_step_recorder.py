"""Steps as the policy observes them: their times, and how many drafts were accepted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from drafters.control.policy import Load, Policy, Step
from drafters.vllm.scheduling import step_recorder
from drafters.vllm.scheduling.step_recorder import StepRecorder, load_of


def scheduled(k: int = 2, **fields: Any) -> SimpleNamespace:
    return SimpleNamespace(num_spec_tokens_to_schedule=k, **fields)


def ran(*tokens: list[int]) -> SimpleNamespace:
    return SimpleNamespace(sampled_token_ids=list(tokens))


def test_steps_are_told_in_order_with_their_own_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second begins, asynchronously, before the first has ended: it takes from then on."""
    times = iter([3.0, 3.5, 4.0, 4.0])
    monkeypatch.setattr(step_recorder, "perf_counter", lambda: next(times))
    recorder, told = StepRecorder(3), list[Step]()
    first, second = scheduled(), scheduled(k=0)
    recorder.begin(first, 1.0, Load(2))
    recorder.begin(second, 2.0, Load(1))
    recorder.verified("a", 3, 1)
    recorder.verified("b", 1, 1)
    recorder.end(first, ran([1, 2], [3, 4]))
    recorder.end(second, ran([5]))
    assert recorder.untold == 2
    recorder.tell(cast("Policy", SimpleNamespace(observe=told.append)))
    assert recorder.untold == 0 and list(recorder.recent) == told
    assert [(s.load, s.k, s.seconds, s.tokens) for s in told] == [
        (Load(2), 2, 2.0, 4),
        (Load(1), 0, 1.0, 1),
    ]
    assert [(s.drafted, s.accepted) for s in told] == [((2, 1, 1), (2, 0, 0)), ((0,) * 3,) * 2]


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
    load = load_of(step, requests, 4, {"ends": 1, "reads": 0}, 3)
    assert load == Load(
        requests=2, waiting=4, prefill_tokens=12, context_tokens=30, draft_tokens=2,
        requests_by_draft_limit=(2, 1, 1),
    )  # fmt: skip
    assert load_of(step, requests, 0, {"reads": 0}, 3).requests_by_draft_limit == ()
