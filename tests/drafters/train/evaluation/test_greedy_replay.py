"""The drafts of all anchors, and their replay, equal naive speculation with caches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from drafters.model.config import SelectorConfig
from drafters.model.head import DraftHead
from drafters.train.data.responses import respond
from drafters.train.data.token_sequences import Text, pad
from drafters.train.evaluation.answers import write_answers
from drafters.train.evaluation.evaluate_head import measure
from drafters.train.evaluation.greedy_replay import (
    AcceptanceCounts,
    agreement,
    draft_everywhere,
    walk,
)
from drafters.train.optimisation.loss import DraftLoss
from drafters.train.optimisation.step import Batch, accumulate_gradients
from drafters.train.target import FrozenTarget, States
from tests.drafters.model.whole_text import draft
from tests.drafters.train.conftest import NewHead
from tests.drafters.train.tiny import VOCABULARY

PROMPTS = [[5, 9, 2, 7], [1, 1, 8, 20, 4, 6, 13], [17], [40, 3, 3]]
STEPS = 24
VARIANTS: list[dict[str, Any]] = [
    {},
    {"draft_vocab_size": 30, "norm_before_residual": True},
    {"path_selector": SelectorConfig(4)},
    {"path_selector": SelectorConfig(4, candidates=3), "draft_vocab_size": 30},
    {"ptd_token_id": None},
    {"ptd_token_id": None, "norm_output": True, "draft_vocab_size": 30},
]


def answers(target: FrozenTarget, steps: int = STEPS) -> list[torch.Tensor]:
    texts = dict(respond(target, PROMPTS, steps=steps, temperature=0.0, seed=0))
    return [texts[index].tokens for index in range(len(PROMPTS))]


def trained(head: DraftHead, target: FrozenTarget) -> DraftHead:
    """A head that has seen some of the target's text, so that some drafts are accepted."""
    rows = answers(target)
    if head.config.draft_vocab_size:
        seen, hits = torch.cat(rows).unique(return_counts=True)
        common = seen[hits.argsort(descending=True)][:30]
        unseen = torch.arange(head.config.vocab_size)
        others = unseen[~torch.isin(unseen, seen)][: 30 - len(common)]
        head.set_draft_vocabulary(torch.cat([common, others]).sort().values)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.02)
    loss = DraftLoss(head, target.lm_head, "labels")
    # Never the last text: its drafts stay bad.
    tokens, prompts, ends = pad(
        [Text(row, len(p)) for p, row in zip(PROMPTS[:3], rows[:3], strict=True)]
    )
    taps = target.states(tokens[:, :-1], head.config.eagle_aux_hidden_state_layer_ids).taps
    batch = Batch(tokens, prompts, ends, taps, None)
    chains = [torch.arange(batch.context - depth) for depth in range(1, 5)]
    for _ in range(50):
        accumulate_gradients(loss, batch, chains)
        optimizer.step()
        optimizer.zero_grad()
    return head.eval()


def read_by(head: DraftHead, target: FrozenTarget, text: torch.Tensor) -> torch.Tensor:
    """What a head reads of the target's states for anchors up to 57."""
    return target.states(text[None, :58], head.config.eagle_aux_hidden_state_layer_ids).taps


@torch.no_grad()
def naive(
    target: FrozenTarget, head: DraftHead, prompt: list[int], steps: int, count: int
) -> list[int]:
    """Draft, verify, cut back; one token after another. Returns what each step accepted."""
    cache = DynamicCache()

    def verify(ids: list[int]) -> tuple[list[int], torch.Tensor]:
        output = target.model(
            input_ids=torch.tensor([ids]), past_key_values=cache, output_hidden_states=True
        )
        taps = [output.hidden_states[i] for i in head.config.eagle_aux_hidden_state_layer_ids]
        return output.logits[0].argmax(-1).tolist(), torch.cat(taps, dim=-1)[0]

    choices, taps = verify(prompt)
    output, taken, entries = [choices[-1]], [], [*prompt[1:], choices[-1]]
    while len(output) < steps and output[-1] not in target.end_tokens:
        guess = draft(head, torch.tensor(entries), taps, count).tolist()
        choices, new_taps = verify([output[-1], *guess])
        agreed = next((i for i in range(count) if guess[i] != choices[i]), count)
        cache.crop(len(prompt) + len(output) + agreed)
        taken.append(agreed)
        entries += choices[: agreed + 1]
        taps = torch.cat([taps, new_taps[: agreed + 1]])
        for token in choices[: agreed + 1]:
            if output[-1] not in target.end_tokens:
                output.append(token)
    return taken


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_walk_equals_naive_speculation(
    target: FrozenTarget, new_head: NewHead, variant: dict[str, Any]
) -> None:
    head = trained(new_head(**variant), target)
    # A token that the target comes to write, in the middle of what the head knows.
    target.end_tokens = [int(answers(target)[0][len(PROMPTS[0]) + 12])]
    written = write_answers(target, PROMPTS, steps=STEPS, beyond=6)
    (got,) = measure([head], target, written, counts=[1, 6])
    texts = answers(target)
    assert got.prompts == len(PROMPTS)
    lengths = [len(text) - len(prompt) for text, prompt in zip(texts, PROMPTS, strict=True)]
    assert got.tokens == sum(lengths)
    assert min(lengths) < STEPS == max(lengths)  # some texts end early, and some do not
    overshoot = 0
    for count, result in got.results.items():
        walks = [naive(target, head, prompt, STEPS, count) for prompt in PROMPTS]
        expected = AcceptanceCounts.of([taken for taken in walks if taken], count)
        assert torch.equal(result.steps, expected.steps)
        assert torch.equal(result.accepted, expected.accepted)
        # Neither all nor none, or the comparison would hold for a broken walk too.
        assert 0 < result.accepted.sum() < count * result.steps.sum()
        overshoot += sum(
            1 + len(taken) + sum(taken) - length
            for taken, length in zip(walks, lengths, strict=True)
        )
    assert overshoot > 0  # accepted behind the end, and counted, as an engine counts it


def test_heads_that_are_measured_together_are_as_each_alone(
    target: FrozenTarget, new_head: NewHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target reads an answer once for heads that read the same layers of it."""
    heads = [
        trained(new_head(**variant), target)
        for variant in ({}, {"path_selector": SelectorConfig(4)}, {"ptd_token_id": None})
    ]
    heads.append(new_head(eagle_aux_hidden_state_layer_ids=(0, 3)))
    assert heads[0].config.eagle_aux_hidden_state_layer_ids != (0, 3)
    written = write_answers(target, PROMPTS, steps=STEPS, beyond=3)
    alone = [measure([head], target, written, counts=[3])[0] for head in heads]
    read: list[int] = []
    states = FrozenTarget.states

    def counted(self: FrozenTarget, tokens: torch.Tensor, taps: Sequence[int]) -> States:
        read.append(tokens.shape[1])
        return states(self, tokens, taps)

    monkeypatch.setattr(FrozenTarget, "states", counted)
    for one, other in zip(measure(heads, target, written, counts=[3]), alone, strict=True):
        assert torch.equal(one.results[3].accepted, other.results[3].accepted)
    assert len(read) == 2 * sum(count > 1 for count in written.written)


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3", "selector"])
def test_passes_of_any_size_draft_the_same(
    target: FrozenTarget, new_head: NewHead, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {} if kind != "eagle3" else {"ptd_token_id": None}
    if kind == "selector":
        changes["path_selector"] = SelectorConfig(4)
    head, text = new_head(**changes), torch.randint(200, (60,))
    with torch.no_grad():
        tables = None if head.selector is None else head.selector_tables()
    taps = read_by(head, target, text)
    whole = draft_everywhere(head, taps, text, 2, 57, 5, tables=tables)
    for slots in (1, 35):
        monkeypatch.setattr("drafters.train.evaluation.greedy_replay._SLOTS", slots)
        again = draft_everywhere(head, taps, text, 2, 57, 5, tables=tables)
        assert torch.equal(again, whole)


def test_a_selector_changes_drafts_behind_the_first_only(
    target: FrozenTarget, new_head: NewHead
) -> None:
    head = new_head(path_selector=SelectorConfig(4))
    text = torch.randint(200, (60,))
    with torch.no_grad():
        tables = head.selector_tables()
    taps = read_by(head, target, text)
    plain = draft_everywhere(head, taps, text, 2, 57, 5)
    walked = draft_everywhere(head, taps, text, 2, 57, 5, tables=tables)
    assert torch.equal(plain[:, 0], walked[:, 0])
    assert all(bool((plain[:, place] != walked[:, place]).any()) for place in range(1, 5))

    seen: list[tuple[int, int]] = []

    def choose(logits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """As NoisyDrafts are asked: with the places, and with what is left of the logits."""
        assert places.tolist() == list(range(4 + len(seen), 60 + len(seen)))
        seen.append((int(logits[0].isfinite().sum()), len(logits)))
        return logits.argmax(-1)

    again = draft_everywhere(head, taps, text, 2, 57, 5, choose, tables)
    assert torch.equal(again, walked)
    assert seen == [(VOCABULARY, 56)] + [(16, 56)] * 4


def test_an_answer_of_one_token_takes_no_step(target: FrozenTarget, new_head: NewHead) -> None:
    firsts = [int(text[len(prompt)]) for text, prompt in zip(answers(target), PROMPTS, strict=True)]
    ended = copy.copy(target)
    ended.end_tokens = [firsts[0]]
    written = write_answers(ended, PROMPTS, steps=STEPS, beyond=2)
    (result,) = measure([new_head()], ended, written, counts=[2])
    assert len(result.results[2].steps) == len(PROMPTS) - firsts.count(firsts[0])


def test_agreement_stops_at_the_first_difference() -> None:
    tokens = torch.tensor([9, 9, 1, 2, 3, 4, 5, 6])
    drafted = torch.tensor([[2, 3, 4], [3, 0, 5], [0, 5, 6]])
    assert agreement(drafted, tokens, 1) == [3, 1, 0]


def test_a_step_goes_on_behind_what_it_accepted() -> None:
    agreeing = [2, 0, 5, 1, 0, 3]
    assert walk(agreeing, 1) == [1, 1, 0, 1]
    assert walk(agreeing, 2) == [2, 1, 2]
    assert walk(agreeing, 9) == [2, 1, 3]
    assert walk([], 4) == []


def test_lengths_count_the_bonus_token() -> None:
    result = AcceptanceCounts.of([[0, 2], [3]], 3)
    assert result.steps.tolist() == [2, 1]
    assert result.accepted.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert result.length == pytest.approx(8 / 3)
    assert result.per_position == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert result.conditional == pytest.approx([2 / 3, 1.0, 1 / 2])
    assert AcceptanceCounts.of([[0]], 2).conditional == [0.0, None]
