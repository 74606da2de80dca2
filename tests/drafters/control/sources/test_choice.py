"""The choice between head and lookups under load, simulated."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drafters.config import HEAD, LOOKUP
from tests.drafters.control.engines import SMOLLM2
from tests.drafters.control.sources.simulated import CHAT, COPY, Kind, Simulation

STEPS = 1500


def rate(kinds: list[Kind], *sources: str, seed: int = 0) -> float:
    simulation = Simulation(kinds, seed, sources or None)
    simulation.run(STEPS)
    return simulation.tokens_per_second


@pytest.mark.parametrize("requests", [1, 8])
def test_a_batch_of_copies_skips_the_heads_pass(requests: int) -> None:
    both = Simulation([COPY] * requests)
    both.run(STEPS)
    gain = both.tokens_per_second / rate([COPY] * requests, HEAD)
    print(f"{requests} copies: {gain:.2f} times the head alone, {both.passes} passes")
    assert both.passes < 0.2 * STEPS
    assert gain > 1.6


@pytest.mark.parametrize("requests", [1, 4, 8, 16])
def test_chat_loses_nothing_to_lookups(requests: int) -> None:
    ratios = [
        rate([CHAT] * requests, seed=seed) / rate([CHAT] * requests, HEAD, seed=seed)
        for seed in range(3)
    ]
    print(f"{requests} chats: {[f'{ratio:.3f}' for ratio in ratios]} of the head alone")
    assert sum(ratios) / 3 > 0.99


def test_steps_without_drafts_are_seen_where_every_step_has_a_lookup() -> None:
    """Eight texts of 6,000 tokens, whose steps take three times what start-up measured: K = 0 is
    in force until drafts of the head are tried, and its own cost is of start-up until then."""
    hardware = replace(SMOLLM2, context=1.1e-6)
    ratios = []
    for seed in range(3):
        both, head = (
            Simulation([CHAT] * 8, seed, sources, hardware, noise=0.08, context=6000)
            for sources in (None, (HEAD,))
        )
        both.run(800)
        head.run(800)
        ratios.append(both.tokens_per_second / head.tokens_per_second)
    print(f"{[f'{ratio:.3f}' for ratio in ratios]} of the head alone")
    assert sum(ratios) / 3 > 0.97


@pytest.mark.parametrize("requests", [8, 16])
def test_chat_behind_long_contexts_loses_little_to_doubtful_lookups(requests: int) -> None:
    """A request that verifies any draft takes 2 ms more behind 2,000 tokens, and each draft token
    1.2 ms: two cores without matrix units, where no draft pays in chats."""
    hardware = replace(SMOLLM2, base=19e-3, request=9e-4, token=1.2e-3, drafter=3e-3,
                       drafter_token=2e-4, context=0.7e-6)  # fmt: skip
    plain = requests / hardware.target(requests, requests, requests * 2000)
    ratios = []
    for seed in range(8):
        chats = Simulation(
            [CHAT] * requests, seed, None, hardware, noise=0.08, context=2000, verifying_s=1e-6
        )
        chats.run(700)
        ratios.append(chats.tokens_per_second / plain)
    mean = sum(ratios) / len(ratios)
    print(f"{requests} chats: {mean:.3f} of the tokens without drafts, {min(ratios):.3f} at worst")
    assert mean > 0.955


def test_lookups_alone_are_measured_against_steps_without_drafts() -> None:
    """Where every step has a lookup and no head is there, what a step takes without any is looked
    at time and again, also when contexts have grown."""
    hardware = replace(SMOLLM2, context=1.1e-6)
    alone = Simulation([COPY] * 8, 0, (LOOKUP,), hardware)
    for context in (500, 6000):
        alone.context = context
        alone.run(1500)
        plain = hardware.target(8, 8, 8 * context)
        assert alone.controller.costs.row(8)[0].seconds == pytest.approx(plain, rel=0.15)
    state = alone.controller.snapshot()
    assert state["probes"]["plain"] > 3 and state["probe_tokens"] < 0.01 * alone.tokens


@pytest.mark.parametrize("copies", [1, 4])
def test_a_mixed_batch_is_better_than_with_either_source(copies: int) -> None:
    kinds = [COPY] * copies + [CHAT] * (8 - copies)
    both, head, lookup = rate(kinds), rate(kinds, HEAD), rate(kinds, LOOKUP)
    print(f"{copies} of 8 copy: {both / head:.2f} of the head, {both / lookup:.2f} of lookup")
    assert both > 1.02 * head and both > 0.99 * lookup


def test_lookups_that_fail_do_not_lower_the_heads_acceptance() -> None:
    """A text that repeats its n-grams and then goes on otherwise."""
    simulation = Simulation([Kind(((0.9, 4, 0.05),))] * 2)
    simulation.run(STEPS)
    alone = Simulation([Kind(())] * 2, sources=(HEAD,))
    alone.run(STEPS)
    found = simulation.controller.acceptance.conditional()
    expected = alone.controller.acceptance.conditional()
    assert found[:2] == pytest.approx(expected[:2], abs=0.06)
    assert simulation.tokens_per_second > 0.99 * alone.tokens_per_second
    counts = simulation.controller.snapshot()["totals"]["sources"]
    assert counts[LOOKUP]["drafted"] < 0.02 * counts[HEAD]["drafted"]
