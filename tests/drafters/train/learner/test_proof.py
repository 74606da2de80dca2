from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from drafters.train.data.token_sequences import Text
from drafters.train.learner.proof import (
    CandidateReplay,
    Comparison,
    _prompt_numbers,
    compare,
    compare_tenants,
)


def comparison(faster: float, answers: int = 60) -> Comparison:
    """Answers of 100 tokens that take about `faster` times fewer steps with the candidate."""
    draw = random.Random(7)
    before = [draw.randint(40, 60) for _ in range(answers)]
    after = [max(round(steps / faster + draw.uniform(-1, 1)), 1) for steps in before]
    tokens = torch.full((answers,), 100)
    return compare(tokens, torch.tensor(before), torch.tensor(after), torch.arange(answers))


def replay(captured: float, mix: float = 1.0, **tenants: float) -> CandidateReplay:
    return CandidateReplay(
        comparison(captured),
        {name: comparison(faster) for name, faster in tenants.items()},
        comparison(mix),
    )


def test_the_ratio_of_steps_is_that_of_acceptance_lengths():
    tokens, prompts = torch.tensor([10, 20]), torch.tensor([0, 1])
    found = compare(tokens, torch.tensor([6, 9]), torch.tensor([4, 6]), prompts)
    assert (found.answers, found.prompts, found.tokens) == (2, 2, 30)
    assert (found.before, found.after, found.ratio) == (2.0, 3.0, 1.5)
    assert found.interval is not None and found.interval[0] <= 1.5 <= found.interval[1]
    one = torch.tensor([9]), torch.tensor([4]), torch.tensor([3]), torch.tensor([0])
    assert compare(*one).interval is None


def test_many_answers_to_few_prompts_prove_no_more_than_the_prompts():
    """The fault: five prompts, answered six times each, counted as 30 independent answers, and a
    head that is better on three of the prompts was better with 95% confidence."""
    steps = torch.tensor([42, 45, 48, 51, 51])
    before, after = torch.full((30,), 50), steps.repeat(6)
    tokens, prompts = torch.full((30,), 100), torch.arange(5).repeat(6)
    found = compare(tokens, before, after, prompts)
    assert (found.answers, found.prompts, found.better) == (30, 5, False)
    assert found.interval == compare(tokens[:5], before[:5], after[:5], prompts[:5]).interval
    apart = compare(tokens, before, after, torch.arange(30))
    assert apart.better and apart.ratio == found.ratio
    gain = compare(tokens, before, after - 8, prompts)
    assert gain.better, "on all five prompts"


def test_equal_prompts_have_one_number():
    texts = [Text(torch.tensor(row), 2) for row in ([1, 2, 3], [1, 2, 4], [2, 1, 3], [1, 2, 3, 4])]
    texts.append(Text(torch.tensor([1, 2, 3]), 1))
    assert _prompt_numbers(texts).tolist() == [0, 0, 1, 0, 2]


def test_a_better_candidate_is_favoured():
    assert replay(1.10).objection() is None


@pytest.mark.parametrize("faster", [1.0, 0.9])
def test_a_candidate_that_is_not_better_is_refused(faster: float):
    assert replay(faster).objection() == "not better on captured answers"


def test_a_single_answer_proves_nothing():
    tokens, before, after = torch.tensor([100]), torch.tensor([50]), torch.tensor([25])
    one = compare(tokens, before, after, torch.tensor([0]))
    assert CandidateReplay(one, {}, None).objection() == "not better on captured answers"


def test_a_tenant_that_loses_is_protected_from_those_who_gain():
    """Somebody's own texts may be learned by heart; others must not pay for it."""
    found = replay(1.10, mallory=1.5, alice=0.93, bob=1.0)
    assert found.objection() == "worse for the tenant 'alice'"
    assert set(found.figures()["tenants"]) == {"mallory", "alice", "bob"}


@pytest.mark.parametrize(("prompts", "refused"), [(1, True), (3, True), (4, False)])
def test_a_tenant_of_few_prompts_is_protected_by_its_ratio(prompts: int, refused: bool):
    """The fault: of one prompt there is no interval, and of two or three none that says that a head
    is worse: it could be worse for that tenant by any amount."""
    number = torch.arange(12) % prompts
    after = torch.full((12,), 50) + 6 * (number == 0)
    tenant = compare(torch.full((12,), 100), torch.full((12,), 50), after, number)
    assert tenant.ratio < 0.98
    few = tenant if prompts < 4 else None
    found = CandidateReplay(comparison(1.10), {"alice": tenant}, comparison(1.0), few)
    assert found.objection() == ("worse for the tenant 'alice'" if refused else None)


def of_tenants(gains: list[float], prompts: int, seed: int = 0) -> CandidateReplay:
    """A replay of tenants whose answers, of 100 tokens, take 50 steps with the head in force. The
    gain differs between a tenant's prompts, so that its mean has a standard deviation of 2.5%; each
    prompt has nine answers or, of more than nine prompts, one."""
    draw = random.Random(seed)
    names, after, number = list[str](), list[int](), list[int]()
    for tenant, gain in enumerate(gains):
        for prompt in range(prompts):
            own = gain + draw.gauss(0.0, 0.025 * prompts**0.5)
            for _ in range(max(9 // prompts, 1)):
                names.append(f"t{tenant}")
                number.append(tenant * prompts + prompt)
                after.append(round(50 / own + draw.uniform(-1.0, 1.0)))
    steps = torch.full((len(after),), 50), torch.tensor(after)
    tokens = torch.full((len(after),), 100)
    tenants, few = compare_tenants(names, tokens, *steps, torch.tensor(number))
    return CandidateReplay(comparison(1.10), tenants, None, few)


@pytest.mark.parametrize("prompts", [1, 3, 9])
def test_a_good_candidate_is_favoured_whatever_the_number_of_tenants(prompts: int):
    """The fault: of twenty tenants of three prompts one had a ratio below 0.98 by chance in half of
    the replays of a head that is better for all."""
    found = [of_tenants([1.02] * 20, prompts, seed).objection() for seed in range(30)]
    assert sum(reason is not None for reason in found) <= 3


def test_a_tenant_that_loses_is_found_among_twenty():
    found = of_tenants([1.02] * 19 + [0.9], 20)
    assert found.objection() == "worse for the tenant 't19'"
    all_of_few = of_tenants([0.93] * 20, 3)
    assert all_of_few.objection() == "worse for the tenants of few prompts together"
    ruined = of_tenants([1.02] * 19 + [0.7], 1)
    assert ruined.objection() == "worse for the tenant 't19'"


def test_a_candidate_that_forgets_the_mix_is_refused():
    assert replay(1.10, mix=0.95).objection() == "worse on the texts that are mixed in"
    assert replay(1.10, mix=0.99).objection() is None


def test_what_generations_forget_together_is_measured_too():
    """Each may forget 2%, and ten of them a fifth: the first head is the measure."""
    favoured = replay(1.10, mix=0.99)
    sunk = dataclasses.replace(favoured, mix_against_first=comparison(0.95))
    assert sunk.objection() == "worse on the texts that are mixed in"
    assert dataclasses.replace(favoured, mix_against_first=comparison(0.99)).objection() is None
