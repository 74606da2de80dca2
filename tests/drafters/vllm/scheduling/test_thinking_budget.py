"""Drafts of requests whose reasoning has a small budget."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

from drafters.vllm.scheduling.limits import within_budget
from drafters.vllm.scheduling.step_output import WorkerStepOutput
from tests.drafters.vllm.scheduler_harness import K_MAX, SchedulerHarness, configuration

THOUGHT, ANSWER, START, END, VOCABULARY = 5, 7, 8, 9, 10
CONFIG: Any = SimpleNamespace(reasoning_start_token_ids=[START], reasoning_end_token_ids=[END])


@pytest.mark.parametrize("budget", [None, *range(K_MAX + 1)])
def test_drafts_of_reasoning_end_at_its_budget(budget: int | None) -> None:
    configured = configuration(head="eagle3")
    configured.reasoning_config = CONFIG
    harness = SchedulerHarness(configured, seed=1, blocks=99, window=4)
    scheduler = harness.scheduler
    drafts = [THOUGHT, START, *[THOUGHT] * (K_MAX - 2)]
    kept = drafts if budget is None else drafts[: 1 + budget]
    harness.arrive(prompt=3, most=30, budget=budget)
    steps = 0
    while harness.alive():
        scheduled = scheduler.schedule()
        offered = scheduled.scheduled_spec_decode_tokens.get("r1", [])
        steps += offered == kept
        assert offered == kept[: len(offered)]
        output = ModelRunnerOutput(["r1"], {"r1": 0}, [[THOUGHT] * (1 + len(offered))])
        WorkerStepOutput(DraftTokenIds(["r1"], [drafts])).attach(output)
        scheduler.update_from_output(scheduled, output)
    assert steps > 1
    harness.arrive(prompt=3, most=1)
    scheduler.schedule()
    assert not scheduler._budgets, "what has ended is forgotten"


@pytest.mark.parametrize("begins_after", [None, 0, 2, 6])
@pytest.mark.parametrize("budget", range(K_MAX + 3))
def test_reasoning_has_its_budget_exactly(budget: int, begins_after: int | None) -> None:
    """It begins in the prompt, or behind some tokens of the answer. The fault: vLLM counts what the
    target has accepted, and does not see that reasoning begins among a step's drafts."""
    for seed in range(12):
        output = decoded(budget, begins_after, Random(seed))
        begin = 0 if begins_after is None else output.index(START) + 1
        assert output.index(END) - begin == budget


def decoded(budget: int, begins_after: int | None, random: Random) -> list[int]:
    """The answer of a target that never ends its reasoning by itself, decoded with drafts."""
    prompt = [1, START] if begins_after is None else [1]
    output: list[int] = []
    holder = ThinkingBudgetStateHolder(CONFIG, 4, K_MAX, torch.device("cpu"), False)
    added = [(0, SamplingParams(thinking_token_budget=budget), prompt, output)]
    holder.sync_batch(BatchUpdate(batch_size=1, removed=[], added=added, moved=[]))
    drafts: list[int] = []

    def own_token(text: Sequence[int]) -> int:
        if len(text) == begins_after:
            return START
        return ANSWER if END in text else THOUGHT

    while END not in output[:-2]:
        logits = torch.zeros(len(drafts) + 1, VOCABULARY)
        for row in range(len(logits)):
            logits[row, own_token([*output, *drafts[:row]])] = 1
        holder.update_state([output], [drafts])
        bonus = holder.apply_to_logits(logits[-1:], True, [drafts])
        own = [*holder.apply_to_logits(logits[:-1], False, [drafts]).argmax(1).tolist()]
        own.append(int(bonus.argmax()))
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == own[accepted]:
            accepted += 1
        output += own[: accepted + 1]
        drafts = []
        for _ in range(K_MAX):
            right = own_token([*output, *drafts])
            drafts.append(right if random.random() < 0.9 else ANSWER)
        drafts = drafts[: within_budget(drafts, [], [START], budget)]
    return output
