"""Lookups beside vLLM's batch: texts that grow, move, are preempted, and end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from drafters.config import MAX_K
from drafters.control.policy import Match
from drafters.vllm.v1.lookup import LookupDrafter, LookupProposer

LONGEST = 32


class Runner:
    """What a lookup drafter reads of vLLM's model runner."""

    def __init__(self, **texts: list[int]) -> None:
        self.max_model_len, self.num_spec_tokens = LONGEST, 10
        self.requests = {name: SimpleNamespace(sampling_params=SamplingParams()) for name in texts}
        self.input_batch = SimpleNamespace(
            req_ids=list(texts), num_reqs=len(texts),
            token_ids_cpu=np.zeros((len(texts), LONGEST), np.int32),
            num_tokens_no_spec=np.array([len(text) for text in texts.values()]),
        )  # fmt: skip
        for row, text in enumerate(texts.values()):
            self.input_batch.token_ids_cpu[row, : len(text)] = text
        self.discard_request_mask = SimpleNamespace(np=np.zeros(len(texts), bool))

    def make(self, *tokens: list[int]) -> Any:
        """A step's tokens, as the sampler gives them; they are in the batch afterwards."""
        widest = max(map(len, tokens))
        return np.array([made + [-1] * (widest - len(made)) for made in tokens])

    def keep(self, *tokens: list[int]) -> None:
        batch = self.input_batch
        for row, made in enumerate(tokens):
            end = batch.num_tokens_no_spec[row]
            batch.token_ids_cpu[row, end : end + len(made)] = made
            batch.num_tokens_no_spec[row] += len(made)


def step(runner: Runner, drafter: LookupDrafter, *tokens: list[int]) -> list[Any]:
    found = drafter.candidates(runner.make(*tokens), np.zeros(len(tokens), np.int64))
    runner.keep(*tokens)
    return found


def ended(*names: str, preempted: tuple[str, ...] = ()) -> SimpleNamespace:
    return SimpleNamespace(finished_req_ids=set(names), preempted_req_ids=set(preempted))


def test_each_request_is_looked_up_in_its_own_text_alone() -> None:
    runner = Runner(a=[1, 2, 3, 4, 9, 1], b=[5, 6, 7, 1])
    drafter = LookupDrafter(runner, 10)
    a, b = step(runner, drafter, [2], [2])
    assert (a.match, b.match) == (2, 0)  # what follows 1, 2 is in the other request's text
    assert drafter.draft("a", 3) == [3, 4, 9] and drafter.matches == ()
    step(runner, drafter, [3, 4, 5], [6])
    assert drafter.matches == (Match(2, 3, 2),)
    drafter.sync_requests(ended("a", "b"))
    assert not drafter._requests


def test_limits_of_a_request_hold_for_its_lookups() -> None:
    texts = {name: [1, 2, 3, 4, 9, 1] for name in ("free", "limited", "biased", "prompt")}
    runner = Runner(**texts, long=[*range(100, 124), 1, 2, 3, 4, 9, 1])
    runner.requests["limited"].sampling_params.extra_args = {MAX_K: 4}
    runner.requests["biased"].sampling_params.logit_bias = {3: 5.0}
    runner.discard_request_mask.np[3] = True
    found = step(runner, LookupDrafter(runner, 10), *([2] for _ in range(5)))
    assert [each.limit for each in found] == [10, 4, 0, 0, 1]
    assert [each.match for each in found] == [2, 2, 0, 0, 2]


def test_steps_without_lookups_are_made_up_for() -> None:
    """As in a probe, whose steps look nothing up; and the request has moved to another row."""
    runner = Runner(a=[1, 2, 3, 4, 9], b=[8, 8])
    drafter = LookupDrafter(runner, 10)
    step(runner, drafter, [1], [7])
    runner.keep([2, 3], [7])
    batch = runner.input_batch
    batch.req_ids = ["b", "a"]
    batch.token_ids_cpu[[0, 1]] = batch.token_ids_cpu[[1, 0]]
    batch.num_tokens_no_spec[[0, 1]] = batch.num_tokens_no_spec[[1, 0]]
    b, a = step(runner, drafter, [7], [4])
    assert (a.match, b.match) == (4, 2)
    assert drafter.draft("a", 2) == [9, 1]


def test_a_text_that_is_another_one_is_indexed_anew() -> None:
    """A request that comes again after a preemption, and one whose last token was taken back."""
    runner = Runner(a=[1, 2, 3, 4, 9, 1])
    drafter = LookupDrafter(runner, 10)
    step(runner, drafter, [2])
    drafter.sync_requests(ended(preempted=("a",)))
    assert step(runner, drafter, [3])[0].match == 3 and drafter.matches == ()
    runner.input_batch.num_tokens_no_spec[0] -= 1
    runner.input_batch.token_ids_cpu[0, 7] = 0
    assert step(runner, drafter, [9])[0].match == 0 and drafter.matches == ()
    assert step(runner, drafter, [1])[0].match == 2


def test_without_a_head_the_batch_has_the_tokens_before_they_are_looked_up() -> None:
    """vLLM enters them first where a drafter reads tokens on the host."""
    runner = Runner(a=[1, 2, 3, 4, 9, 1], b=[5, 6])
    drafter, none = LookupDrafter(runner, 10), np.full((2, 1), -1)
    runner.keep([2], [7])
    a, b = drafter.candidates(none, None)
    assert (a.match, b.match) == (2, 0) and drafter.draft("a", 2) == [3, 4]
    runner.keep([3, 4, 5], [8])
    drafter.candidates(none, None)
    assert drafter.matches == (Match(2, 3, 2),)


def test_an_engine_without_this_project_s_worker_does_not_draft() -> None:
    proposer = LookupProposer(SimpleNamespace())
    proposer.load_model(object())
    with pytest.raises(RuntimeError, match="worker"):
        proposer.propose([[1]])
