"""The one-pass walk against naive speculative decoding with caches."""

from __future__ import annotations

import pytest
import torch

from drafters.model.drafting import draft
from drafters.model.llama import Llama
from drafters.model.peagle import PEagleHead
from drafters.train.evaluate import measure
from drafters.train.generate import generate
from drafters.train.loop import LoopOptions, train_head
from drafters.train.progress import Progress
from drafters.train.rollouts import roll_out
from drafters.train.walk import Acceptance

PROMPTS = [[5, 9, 2, 7], [1, 1, 8, 20, 4, 6, 13], [17, 3]]
END = (23,)


def _naive(target: Llama, head: PEagleHead, prompt: list[int], steps: int, count: int) -> list[int]:
    """Draft, verify, cut back; one token after another. Returns what each step accepted."""
    cache, drafts = target.new_cache(1, 256), head.new_cache(1, 256)
    taps_of = head.config.eagle_aux_hidden_state_layer_ids

    def verify(ids: list[int]) -> tuple[list[int], torch.Tensor]:
        past, n = cache.length, len(ids)
        allowed = torch.ones(1, n, past + n, dtype=torch.bool).tril(past)
        positions = torch.arange(past, past + n)[None]
        hidden, taps = target(torch.tensor([ids]), positions, allowed, taps_of, cache)
        assert taps is not None
        return target.logits(hidden[0]).argmax(-1).tolist(), taps[0]

    choices, taps = verify(prompt)
    output, taken, entries = [choices[-1]], [], [*prompt[1:], choices[-1]]
    while len(output) < steps and output[-1] not in END:
        guess = draft(head, target.lm_head, drafts, torch.tensor(entries), taps, count).tolist()
        choices, taps = verify([output[-1], *guess])
        agreed = next((i for i in range(count) if guess[i] != choices[i]), count)
        cache.truncate(cache.length - (count - agreed))
        taken.append(agreed)
        entries, taps = choices[: agreed + 1], taps[: agreed + 1]
        for token in entries:
            if output[-1] not in END:
                output.append(token)
    return taken


@pytest.fixture
def trained(pair: tuple[Llama, PEagleHead]) -> tuple[Llama, PEagleHead]:
    """A head that has seen the target's text, so that some of its drafts are accepted."""
    target, head = pair
    prompts = torch.randint(24, (16, 4), generator=torch.Generator().manual_seed(8)).tolist()
    generator = torch.Generator().manual_seed(9)
    rollout = roll_out(target, prompts, END, temperature=0.0, generator=generator, steps=40)
    options = LoopOptions(muon_lr=0.1, adam_lr=0.05)
    train_head(head, target, [rollout], Progress(tokens=8_000), options)
    return target, head


def test_walk_equals_naive_speculation(trained: tuple[Llama, PEagleHead]) -> None:
    target, head = trained
    results = measure(head, target, PROMPTS, END, steps=40, counts=[1, 3, 7])
    for count, got in results.items():
        expected = Acceptance.nothing(count)
        for prompt in PROMPTS:
            for agreed in _naive(target, head, prompt, 40, count):
                expected.add(agreed)
        assert got == expected
        # Neither all nor none, or the comparison would hold for a broken walk too.
        assert 0 < sum(got.accepted) < count * got.steps


def test_padding_does_not_change_the_text(pair: tuple[Llama, PEagleHead]) -> None:
    target, _ = pair
    together = generate(target, PROMPTS, 12)
    for prompt, row in zip(PROMPTS, together, strict=True):
        assert torch.equal(generate(target, [prompt], 12)[0], row)


def test_lengths_count_the_bonus_token() -> None:
    result = Acceptance.nothing(3)
    for taken in (0, 2, 3):
        result.add(taken)
    assert result.length == pytest.approx(8 / 3)
    assert result.per_position == pytest.approx([2 / 3, 2 / 3, 1 / 3])
