from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from drafters.learning.captured import Captured
from drafters.train.learner.sequences import _Split, choose, content, is_held_back, shares


def sequences(tenant: str, count: int, answer: int = 20, seed: int = 0) -> Iterator[Captured]:
    draw = random.Random(f"{tenant} {seed}")
    for number in range(count):
        prompt = [draw.randrange(1000) for _ in range(12)]
        yield Captured(float(number), tenant, 0, prompt, [draw.randrange(1000)] * answer, [])


def tokens_of(found: list[Captured], tenant: str) -> int:
    return sum(len(item.answer) for item in found if item.tenant == tenant)


def test_a_tenant_that_floods_gives_half_at_most_and_the_others_all_they_have():
    flood = list(sequences("flood", 5000))
    others = [item for name in ("a", "b", "c") for item in sequences(name, 40)]
    chosen = choose(flood + others, answer_tokens=10_000, vocabulary=1000, max_length=100)
    assert 4900 <= tokens_of(chosen.trained, "flood") <= 5020
    for name in ("a", "b", "c"):
        mine = [item for item in others if item.tenant == name]
        assert all(item in chosen.trained + chosen.held_back for item in mine)
    assert tokens_of(chosen.held_back, "flood") <= 10_000 // 8 / 2 + 20


def test_shares_grow_with_the_square_root_of_what_tenants_have():
    given = shares({"a": 10_000, "b": 40_000, "c": 90_000}, 6000)
    assert given == {"a": 1000, "b": 2000, "c": 3000}
    assert shares({"a": 50}, 6000) == {"a": 50}
    assert shares({"a": 50_000}, 6000) == {"a": 6000}
    assert shares({"a": 10, "b": 50_000}, 6000) == {"a": 10, "b": 3000}
    assert shares({}, 6000) == {}


def test_shares_never_exceed_the_budget():
    draw = random.Random(5)
    for _ in range(200):
        available = {str(i): int(10 ** draw.uniform(0, 6)) for i in range(draw.randint(1, 12))}
        given = shares(available, 5000)
        assert sum(given.values()) <= 5000
        assert all(given[name] <= available[name] for name in available)


def test_the_newest_sequences_of_a_tenant_are_used():
    found = choose(sequences("a", 1000), answer_tokens=400, vocabulary=1000, max_length=100)
    assert len(found.trained) == 20
    assert min(item.at for item in found.trained) > 950


@pytest.mark.parametrize("answer_tokens", [5, 7, 8])
def test_a_budget_of_a_few_tokens_is_kept_to(answer_tokens: int):
    found = choose(sequences("a", 50), answer_tokens=answer_tokens, vocabulary=1000, max_length=100)
    assert len(found.trained) == 1


def test_long_answers_are_held_back_in_number_and_counted_as_they_are_used():
    """The fault: a budget of tokens alone held back one answer of 7,000 tokens, of which nothing
    can be shown, and left an answer's cut-off end in the count of what is trained on."""
    found = choose(
        sequences("a", 60, answer=7000), answer_tokens=50_000, vocabulary=1000, max_length=4096
    )
    assert len(found.held_back) >= 8
    assert {len(item.answer) for item in found.held_back} == {256}
    assert {len(item.answer) for item in found.trained} == {4096 - 12}
    assert len(found.trained) == 13  # a bit more than 50,000 tokens
    many = choose(
        sequences("a", 2000, answer=300), answer_tokens=50_000, vocabulary=1000, max_length=4096
    )
    assert len(many.held_back) == 32


def test_every_tenant_has_enough_answers_to_be_judged_by():
    """So that none is too small for the protection from heads that are worse for it."""
    names = [f"t{number}" for number in range(20)]
    items = [item for name in names for item in sequences(name, 300, answer=1000)]
    found = choose(items, answer_tokens=50_000, vocabulary=1000, max_length=4096)
    counts = Counter(item.tenant for item in found.held_back)
    assert set(counts) == set(names)
    assert min(counts.values()) >= 8
    assert sum(len(item.answer) for item in found.trained) < 50_000 + 20 * 1000


def test_a_prompt_is_on_one_side_only_whoever_sends_it_and_however_often():
    items = list(sequences("a", 400))
    again = [Captured(500.0, "b", 0, item.prompt, [7] * 20, []) for item in items]
    chosen = choose(items + again, answer_tokens=10**6, vocabulary=1000, max_length=100)
    trained = {tuple(item.prompt) for item in chosen.trained}
    held_back = {tuple(item.prompt) for item in chosen.held_back}
    assert not trained & held_back and len(trained | held_back) == 400
    assert 25 <= len(held_back) <= 80
    assert all(is_held_back(list(prompt)) for prompt in held_back)
    assert not chosen.by_answer


@pytest.mark.parametrize("held_back", [False, True])
def test_where_prompts_are_few_answers_are_held_back_too(held_back: bool):
    """The fault: of five prompts none is held back with 51%, and the service never learned; or one
    is, of whose answers no interval is made."""
    draw, prompts = random.Random(1), list[list[int]]()
    while len(prompts) < 5:
        prompt = [draw.randrange(1000) for _ in range(12)]
        if is_held_back(prompt) == (held_back and not prompts):
            prompts.append(prompt)
    items = [
        Captured(float(n), "a", 0, prompts[n % 5], [draw.randrange(1000) for _ in range(20)], [])
        for n in range(400)
    ]
    chosen = choose(items, answer_tokens=10**6, vocabulary=1000, max_length=100)
    assert chosen.by_answer == {"a"}
    assert len(chosen.trained) + len(chosen.held_back) == 400
    assert 25 <= len(chosen.held_back) <= 80
    for part in (chosen.trained, chosen.held_back):
        assert {tuple(item.prompt) for item in part} == set(map(tuple, prompts))
    later = choose(items[200:], answer_tokens=10**6, vocabulary=1000, max_length=100)
    assert [item for item in later.held_back if item in chosen.trained] == []


def test_where_answers_hold_back_no_more_prompts_do():
    """Of three prompts that are asked once each nothing is gained by looking at answers."""
    chosen = choose(sequences("a", 3), answer_tokens=1000, vocabulary=1000, max_length=100)
    assert (len(chosen.trained), chosen.held_back, chosen.by_answer) == (3, [], frozenset())


def answers_to(prompt: list[int], tenant: str, count: int) -> list[Captured]:
    draw = random.Random(2)
    return [
        Captured(float(n), tenant, 0, prompt, [draw.randrange(1000) for _ in range(20)], [])
        for n in range(count)
    ]


def one_prompt(held_back: bool) -> list[int]:
    """A prompt that is held back where there are many, or one that is not."""
    return next([n] * 12 for n in range(1000) if is_held_back([n] * 12) == held_back)


@pytest.mark.parametrize("held_back", [False, True])
def test_a_tenant_of_one_prompt_is_trained_on_and_judges_beside_a_tenant_of_many(held_back: bool):
    """The fault: the whole service was held back by prompts, so that all of such a tenant judged
    and it was never trained on, or nothing of it judged."""
    prompt = one_prompt(held_back)
    items = [*sequences("a", 400), *answers_to(prompt, "b", 400)]
    chosen = choose(items, answer_tokens=10**6, vocabulary=1000, max_length=100)
    assert chosen.by_answer == {"b"}
    counts = [Counter(item.tenant for item in part) for part in (chosen.trained, chosen.held_back)]
    assert counts[0]["b"] + counts[1]["b"] == 400
    assert 25 <= counts[1]["b"] <= 80
    judged = {tuple(item.prompt) for item in chosen.held_back if item.tenant == "a"}
    assert all(is_held_back(list(prompt)) for prompt in judged)


@pytest.mark.parametrize("held_back", [False, True])
def test_what_one_tenant_is_judged_by_is_another_ones_to_train_on_never(held_back: bool):
    answered = answers_to(one_prompt(held_back), "b", 400)
    items = [*sequences("a", 400), *(replace(item, tenant="a") for item in answered), *answered]
    chosen = choose(items, answer_tokens=10**6, vocabulary=1000, max_length=100)
    assert chosen.by_answer == {"b"}
    trained, judged = (
        {(tuple(item.prompt), tuple(item.answer)) for item in part}
        for part in (chosen.trained, chosen.held_back)
    )
    assert not trained & judged
    assert len(trained | judged) == 800


def test_what_is_asked_again_is_as_new_as_its_last_answer():
    """The fault: the commonest questions of a service kept their place of weeks ago, and were the
    first that no round used any more."""
    first, *others = sequences("a", 100)
    again = [*others[:50], first, *others[50:], replace(first, at=200.0)]
    chosen = choose([first, *again], answer_tokens=800, vocabulary=1000, max_length=100)
    assert chosen.left_out == {"duplicate": 2}
    used = chosen.trained + chosen.held_back
    assert [item.at for item in used if list(item.prompt) == list(first.prompt)] == [200.0]
    alone = choose([first] * 9, answer_tokens=30, vocabulary=1000, max_length=100)
    assert len(alone.trained + alone.held_back) == 1


@pytest.mark.parametrize("repeats", [1, 2, 5])
def test_a_conversation_that_is_asked_again_and_again_counts_once(repeats: int):
    """The fault: of a conversation that judges four answers are kept, and each answer beyond them
    was taken from the tenant's tokens at each repeat. Below 0 they ended every round."""
    answered = answers_to(one_prompt(held_back=True), "b", 7)
    split, seen = _Split(8000), set[bytes]()
    for item in answered * repeats:
        key = content(item)
        split.add(key, item, is_new=key not in seen, judges=True, conversation=b"one")
        seen.add(key)
    assert split.held_back.available == 4 * 20
    others = list(sequences("a", 400))
    once = choose([*others, *answered], answer_tokens=4000, vocabulary=1000, max_length=100)
    chosen = choose(
        [*others, *answered * repeats], answer_tokens=4000, vocabulary=1000, max_length=100
    )
    assert chosen.held_back == once.held_back and chosen.trained == once.trained


def test_what_cannot_be_learned_from_is_left_out_and_counted():
    good = list(sequences("a", 3))
    bad = [
        good[0],
        Captured(1.0, "a", 0, [1, 2], [1000, 3], []),
        Captured(1.0, "a", 0, [1000, 2], [1, 3], []),
        Captured(1.0, "a", 0, [1], [5], []),
        Captured(1.0, "a", 0, [], [5, 6], []),
        Captured(1.0, "a", 0, [1] * 99, [5, 6], []),
    ]
    chosen = choose(good + bad, answer_tokens=1000, vocabulary=1000, max_length=100)
    assert len(chosen.trained) + len(chosen.held_back) == 3
    assert chosen.until == 2.0
    assert chosen.left_out == {"duplicate": 1, "unknown token": 2, "too short": 2, "too long": 1}
