"""Which tokens a head may draft after a round."""

from __future__ import annotations

import pytest
import torch

from drafters.train.data.token_sequences import Text
from drafters.train.learner.vocabulary import VocabularyChange, vocabulary_change
from drafters.train.optimisation.head_init import replace_draft_tokens
from drafters.train.target import FrozenTarget
from tests.drafters.train.conftest import NewHead

VOCABULARY_OF_FORTY = torch.arange(40) < 24  # ids that may be drafted


def answer(*tokens: int) -> Text:
    return Text(torch.tensor([39, *tokens]), 1)


def change(captured: list[Text], mix: list[Text]) -> VocabularyChange:
    return vocabulary_change(VOCABULARY_OF_FORTY, captured, mix, always=[0])


def test_a_commoner_token_takes_the_place_of_a_rarer_one() -> None:
    mix = [answer(*range(3, 24), *range(3, 24))]  # 0, 1 and 2 are in no text, and 0 ends texts
    found = change([answer(30, 30, 30, 31), answer(31, 30)], mix)
    assert found == VocabularyChange(added=[30, 31], dropped=[1, 2])


def test_of_equally_rare_tokens_the_last_leaves() -> None:
    """The first ones are bytes and the commonest letters."""
    found = change([answer(30), answer(30)], [])
    assert found == VocabularyChange(added=[30], dropped=[23])


def test_a_token_comes_in_if_it_is_twice_as_common() -> None:
    mix = [answer(*range(1, 24), *range(1, 24))]
    assert change([answer(30, 30), answer(30)], mix).added == []
    assert change([answer(30, 30), answer(30, 30)], mix).added == [30]


def test_a_token_of_one_answer_is_left_out_however_often_it_is_there() -> None:
    assert change([answer(30, 30, 30), answer(5)], []).added == []


def test_a_prompt_does_not_count() -> None:
    assert change([answer(5), answer(6)], []).added == []  # 39 is in both prompts


def test_an_eighth_changes_at_most() -> None:
    tokens = range(25, 39)
    found = change([answer(*tokens), answer(*tokens)], [])
    assert len(found.added) == len(found.dropped) == 24 // 8


@pytest.mark.parametrize("size", [8, 16, 40], ids=lambda size: f"{size}-of-a-target-of-16")
def test_tokens_keep_their_rows_and_new_ones_get_such_as_training_would_make(
    new_head: NewHead, target: FrozenTarget, size: int
) -> None:
    head = new_head(draft_vocab_size=64, hidden_size=size)
    torch.manual_seed(2)
    made = target.lm_head @ torch.randn(16, size) + torch.randn(size)
    head.set_draft_vocabulary(torch.arange(10, 74))
    assert head.lm_head is not None
    with torch.no_grad():
        head.lm_head.weight.copy_(made[10:74])
    before = dict(zip(range(10, 74), head.lm_head.weight.detach().clone(), strict=True))
    replace_draft_tokens(head, target, added=[3, 90], dropped=[12, 40])
    drafted = head.to_target(torch.arange(64)).tolist()
    assert drafted == sorted(drafted)
    assert set(drafted) == set(range(10, 74)) - {12, 40} | {3, 90}
    assert head.t2d.nonzero()[:, 0].tolist() == drafted
    for token, row in zip(drafted, head.lm_head.weight, strict=True):
        expected = before.get(token, made[token])
        torch.testing.assert_close(row, expected, rtol=1e-2, atol=1e-2)
