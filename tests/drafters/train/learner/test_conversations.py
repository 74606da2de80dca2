from __future__ import annotations

import random
import time
from array import array

import pytest
import torch

from drafters.learning.captured import Captured
from drafters.learning.conversations import Conversations
from drafters.train.data.token_sequences import Text
from drafters.train.learner import proof
from drafters.train.learner.proof import Judged
from drafters.train.learner.sequences import choose, is_held_back

MARK, MESSAGE_END = 990, 991  # <|im_start|>, <|im_end|>
SYSTEM = list(range(300, 400))


def message(draw: random.Random, length: int = 20) -> list[int]:
    return [draw.randrange(300) for _ in range(length)]


def chat(
    seed: int, turns: int, *, opening: list[int] | None = None, hidden: int = 0
) -> list[list[int]]:
    """The prompts of a conversation. Of each answer `hidden` tokens are not in the next prompt, nor
    are the last two of its prompt, as of a template that leaves reasoning out."""
    draw = random.Random(seed)
    text, prompts = [*SYSTEM], []
    for turn in range(turns):
        own = opening if turn == 0 and opening else message(draw)
        text += [MARK, 980, *own, MESSAGE_END]
        prompts.append([*text, MARK, 981, *([982, 983] if hidden else [])])
        text += [MARK, 981, *message(draw)[hidden:], MESSAGE_END]
    return prompts


def captured(chats: list[list[list[int]]], at: float = 0.0) -> list[Captured]:
    """Turn by turn, as many users write at the same time."""
    draw = random.Random(3)
    prompts = [each[turn] for turn in range(max(map(len, chats))) for each in chats
               if turn < len(each)]  # fmt: skip
    return [Captured(at + n, "a", 0, prompt, message(draw), []) for n, prompt in enumerate(prompts)]


@pytest.mark.parametrize("hidden", [0, 5])
def test_turns_of_one_conversation_have_one_number(hidden: int):
    """The fault: forty turns of four chats judged as forty independent prompts do."""
    chats = [chat(seed, 10, hidden=hidden) for seed in range(4)]
    conversations = Conversations(MARK)
    found = [[conversations.of(prompt) for prompt in each] for each in chats]
    assert all(len(set(each)) == 1 for each in found)
    assert len({each[0] for each in found}) == 4, "a system prompt makes no conversation"


def test_a_greeting_with_which_many_begin_does_not_make_one_of_them():
    conversations = Conversations(MARK)
    for seed in range(40):
        for prompt in chat(seed, 3, opening=[7, 8]):
            conversations.of(prompt)
    found = {conversations.of(chat(seed, 3, opening=[7, 8])[2]) for seed in range(40)}
    assert 36 <= len(found) <= 40


def test_a_conversation_lies_on_one_side_and_counts_as_one_prompt(monkeypatch: pytest.MonkeyPatch):
    chats = [chat(seed, 10) for seed in range(100)]
    held_back = [each for each in chats if is_held_back(each[0])][:4]
    chats = held_back + [each for each in chats if not is_held_back(each[0])][:26]
    chosen = choose(
        captured(chats), answer_tokens=10**6, vocabulary=1000, max_length=4096, answer_mark=MARK
    )
    judged = {tuple(item.prompt) for item in chosen.held_back}
    trained = {tuple(item.prompt) for item in chosen.trained}
    assert judged < {tuple(prompt) for each in held_back for prompt in each}
    assert trained == {tuple(prompt) for each in chats[4:] for prompt in each}
    assert len(chosen.held_back) == 16 and sorted(set(chosen.conversations)) == [0, 1, 2, 3]
    texts = [
        Text(torch.tensor([*item.prompt, *item.answer]), len(item.prompt))
        for item in chosen.held_back
    ]
    steps = [torch.full((len(texts),), count) for count in (10, 9)]
    monkeypatch.setattr(proof, "_steps", lambda *args: steps)
    of_them = Judged(texts, ["a"] * len(texts), chosen.conversations)
    found = proof.replay(None, (None, None), of_them, [], 3)  # type: ignore[arg-type]
    assert (found.captured.answers, found.captured.prompts) == (16, 4)
    assert found.tenants["a"].prompts == 4


def test_few_conversations_of_many_turns_are_not_held_back_by_answers():
    """They would lie on both sides, and a head that knows them by heart be favoured."""
    chats = [each for each in (chat(seed, 20) for seed in range(40)) if not is_held_back(each[0])]
    chosen = choose(
        captured(chats[:5]), answer_tokens=10**6, vocabulary=1000, max_length=4096, answer_mark=MARK
    )
    assert (len(chosen.trained), chosen.held_back, chosen.by_answer) == (100, [], frozenset())


def test_many_long_prompts_take_seconds():
    draw = random.Random(0)
    tokens = array("I", (draw.randrange(100_000) for _ in range(8000)))
    conversations, began = Conversations(MARK), time.process_time()
    for start in range(4000):
        conversations.of(tokens[start : start + 4000])
    assert time.process_time() - began < 20.0
