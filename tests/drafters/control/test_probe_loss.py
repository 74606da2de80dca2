"""What a probe is said to lose is what it does lose, also where prompts are read meanwhile."""

from __future__ import annotations

from collections import deque

import pytest

from drafters.control.controller import Controller
from drafters.control.cost_table import Cell
from drafters.control.policy import Load, Step
from drafters.control.probes import DEEPER, DRAFT, PLAIN, SHALLOWER, ProbeBudget
from drafters.control.tuning import Tuning

PLAIN_S, DRAFTER_S = 5e-3, 5e-4  # of a step at K = 0, of a drafter pass
TARGET_TOKEN_S, DRAFTER_TOKEN_S = 1e-4, 5e-5  # to read a prompt token
CATCH_UP_TOKENS = 64


@pytest.mark.parametrize(("every", "prompt"), [(10**9, 0), (7, 100), (20, 500), (50, 500), (11, 9)])
@pytest.mark.parametrize(("kind", "drafting_s"), [(PLAIN, 6e-3), (DRAFT, 10.1e-3)])
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_probe_is_charged_what_it_loses(
    lag: int, kind: str, drafting_s: float, every: int, prompt: int
) -> None:
    """Every step is exact, every draft accepted, and one step in `every` reads a prompt. Without
    probes, the same tokens and prompts would have taken `usual` seconds. A step is observed when
    `lag` later ones are chosen. Catches: the drafter's reading credited twice or to a K in force
    that does not read, or cut off where the prompt is longer than the step; a probe that ends with
    a step from before it, and is charged nothing."""
    policy = Controller(1, catch_up_tokens=CATCH_UP_TOKENS, tuning=Tuning(probe_share=0.02))
    policy.load_calibration([Cell(1, 0, PLAIN_S, 16), Cell(1, 1, drafting_s, 16)])
    k_in_force = int(kind == PLAIN)
    step_s, step_tokens = (drafting_s, 2) if k_in_force else (PLAIN_S, 1)
    unobserved: deque[Step] = deque()
    drafts = unread = 0
    actual = usual = before = 0.0
    for number in range(12_000):
        read = prompt if number % every == 0 else 0
        load = Load(1, prefill_tokens=read, context_tokens=10**6, draft_tokens=drafts)
        k = policy.choose(load)
        drafter = (DRAFTER_S + DRAFTER_TOKEN_S * (unread + read)) * k
        verification = (drafting_s - PLAIN_S - DRAFTER_S) * drafts
        seconds = PLAIN_S + verification + TARGET_TOKEN_S * read + drafter
        tokens = 1 + drafts
        unobserved.append(
            Step(load, k, seconds, tokens, (1,) * drafts, (1,) * drafts, draft_seconds=drafter)
        )
        if len(unobserved) > lag:
            policy.observe(unobserved.popleft())
        unread = 0 if k else min(CATCH_UP_TOKENS, unread + read + tokens)
        drafts = k
        if number == 3000:  # costs and acceptance are learned
            before = policy.snapshot()["probe_seconds"]
        elif number > 3000:
            actual += seconds
            usual += step_s * tokens / step_tokens
            usual += (TARGET_TOKEN_S + DRAFTER_TOKEN_S * k_in_force) * read
    state = policy.snapshot()
    assert state["k"] == k_in_force and state["probes"][kind] >= 4
    assert state["probe_seconds"] - before == pytest.approx(actual - usual, rel=0.05)


@pytest.mark.parametrize(
    ("k", "k_in_force", "kind", "steps"),
    [(0, 3, PLAIN, 2), (3, 0, DRAFT, 3), (5, 3, DEEPER, 3), (1, 3, SHALLOWER, 3)],
)
def test_probes_are_counted_by_kind(k: int, k_in_force: int, kind: str, steps: int) -> None:
    """Catches: deeper taken for shallower; no step for the drafts that nobody has verified yet."""
    budget = ProbeBudget(Tuning())
    probe = budget.begin(k, k_in_force, busy_s=0.0, steps_before=0)
    assert (probe.k, probe.steps_to_choose) == (k, steps)
    assert [name for name, count in budget.count_by_kind.items() if count] == [kind]


def test_zero_is_probed_each_minute_whatever_was_lost() -> None:
    """Catches: a debt that forbids it, another K allowed too, one after the other."""
    budget = ProbeBudget(Tuning(plain_probe_s=60.0))
    budget.charge(budget.begin(3, 0, busy_s=0.0, steps_before=0), 1e6)
    assert [second for second in range(59, 181) if _is_begun(budget, 0, second)] == [60, 120, 180]
    assert not budget.allows(3, 0.0, busy_s=1e6)


def _is_begun(budget: ProbeBudget, k: int, busy_s: float) -> bool:
    """Whether a probe of K may begin now; then it has begun."""
    if allowed := budget.allows(k, 1.0, busy_s):
        budget.begin(k, 3, busy_s, steps_before=0)
    return allowed
