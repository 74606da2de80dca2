"""Training: the loss falls at every depth, and a killed run continues as if it had not been."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from drafters.model.config import SelectorConfig
from drafters.model.head import DraftHead
from drafters.train.data.hidden_states import StateStore
from drafters.train.data.token_sequences import Text, Texts, batches
from drafters.train.optimisation.buckets import bucket
from drafters.train.optimisation.head_init import HeadPlan, new_head, weights_digest
from drafters.train.optimisation.loop import LoopOptions, ResumeError, Trainer, partitions_for
from drafters.train.optimisation.loss import chunk_rows, cross_entropy_backward
from drafters.train.optimisation.step import DepthLosses
from drafters.train.progress import Progress
from drafters.train.target import FrozenTarget

OPTIONS = LoopOptions(batch_tokens=256, k_train=4, muon_lr=0.1, adam_lr=0.05)


@pytest.fixture
def texts() -> Texts:
    """Periodic texts of several lengths: learnable by a head that reads them."""
    rows = [4 + (torch.arange(24 + 3 * (i % 5)) + i) % 6 for i in range(24)]
    return Texts.of(Text(row, 5) for row in rows)


def trainer(
    target: FrozenTarget, texts: Texts, tokens: int, options: LoopOptions = OPTIONS,
    method: str = "p-eagle", folder: Path = Path(), start: str | None = None,
    draft_vocabulary: Sequence[int] | None = None, own_embeddings: bool | None = None,
) -> Trainer:  # fmt: skip
    plan = HeadPlan(
        method=method,  # type: ignore[arg-type]
        layers=1,
        taps=(0, 1, 2),
        own_embeddings=own_embeddings,
        draft_vocabulary=draft_vocabulary,
        mask_token=3,
        seed=2,
    )
    head = new_head(target, plan, torch.float32)
    states = StateStore(
        target, texts, (0, 1, 2), folder=folder, limit_bytes=0,
        with_final=options.loss == "distribution",
    )  # fmt: skip
    return Trainer(head, target, texts, states, Progress(tokens=tokens), options, start)


@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_head_learns_text_with_a_period(target: FrozenTarget, texts: Texts, method: str) -> None:
    first = trainer(target, texts, 1, method=method)
    first.run()
    long = trainer(target, texts, 15_000, method=method)
    long.run()
    # Each depth on its own: an unreachable depth keeps its loss and hides in the mean.
    for early, late in zip(first.smoothed.tolist(), long.smoothed.tolist(), strict=True):
        assert late < 0.3 * early


@pytest.mark.parametrize("draft_vocabulary", [None, [4, 5, 6]])
def test_an_epoch_is_one_pass_whatever_the_draft_vocabulary(
    target: FrozenTarget, texts: Texts, draft_vocabulary: list[int] | None
) -> None:
    """The fault: a budget counted all tokens and an update those in the draft vocabulary, so that
    an epoch of a head that drafts half of them was two passes."""
    budget = sum(text.drafted_tokens for text in texts)
    run = trainer(target, texts, budget, draft_vocabulary=draft_vocabulary)
    run.run()
    one_pass = batches(texts, tokens=OPTIONS.batch_tokens, generator=torch.Generator())
    assert run.progress.tokens == budget
    assert abs(run.progress.steps - len(list(one_pass))) <= 1  # batches depend on the order


@pytest.mark.parametrize("infinite", [1, 10])
def test_a_gradient_that_is_not_finite_ends_a_run_only_if_others_follow(
    target: FrozenTarget, texts: Texts, infinite: int
) -> None:
    """The fault: one in the last update threw away the whole run."""
    run = trainer(target, texts, 1)  # the first update is the last one
    gradients, left = run._gradients, infinite

    def spoiled(*arguments: Any) -> DepthLosses:
        nonlocal left
        losses = gradients(*arguments)
        if left:
            left -= 1
            next(p for p in run.head.parameters() if p.grad is not None).grad.fill_(torch.inf)
        return losses

    run._gradients = spoiled
    if infinite == 10:
        with pytest.raises(ValueError, match="the loss is not finite"):
            run.run()
    else:
        run.run()
        assert run.progress.steps == 2
        assert all(weight.isfinite().all() for weight in weights(run.head))
    assert not left


def test_everything_of_a_head_is_trained(target: FrozenTarget, texts: Texts) -> None:
    run = trainer(target, texts, 1)
    old = {name: value.clone() for name, value in run.head.state_dict().items()}
    run.run()
    new = run.head.state_dict()
    assert [name for name, value in new.items() if torch.equal(old[name], value)] == []
    assert torch.equal(target.lm_head, FrozenTarget.load(target._folder).lm_head)


def weights(head: DraftHead) -> list[torch.Tensor]:
    return [value.clone() for value in head.state_dict().values()]


def test_a_killed_run_goes_on_as_if_it_were_not(
    target: FrozenTarget, texts: Texts, tmp_path: Path
) -> None:
    whole = trainer(target, texts, 4_000)
    whole.run()

    file = tmp_path / "run.pt"
    killed = trainer(target, texts, 4_000)

    class Killed(Exception):
        pass

    advance = killed.progress.advance

    def kill(tokens: int, **figures: float) -> None:
        advance(tokens, **figures)
        if killed.progress.steps == 9:  # in the middle of the second epoch
            killed.save(file)
        if killed.progress.steps == 11:  # two updates after the last save: lost
            raise Killed

    killed.progress.advance = kill  # type: ignore[method-assign]
    with pytest.raises(Killed):
        killed.run()
    again = trainer(target, texts, 4_000)
    again.load(file)
    assert again.progress.steps == 9
    again.run()
    assert again.progress.steps == whole.progress.steps > 11
    for resumed, wanted in zip(weights(again.head), weights(whole.head), strict=True):
        assert torch.equal(resumed, wanted)
    assert torch.equal(again.smoothed, whole.smoothed)


def test_another_run_is_not_taken_up(target: FrozenTarget, texts: Texts, tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    trainer(target, texts, 100).save(file)
    with pytest.raises(ResumeError, match="options"):
        trainer(target, texts, 100, LoopOptions(batch_tokens=256, k_train=5)).load(file)
    with pytest.raises(ResumeError, match="config"):
        trainer(target, texts, 100, method="eagle3").load(file)
    with pytest.raises(ResumeError, match="texts"):
        trainer(target, Texts.of([texts[0]]), 100).load(file)
    with pytest.raises(ResumeError, match="other own embeddings: True"):
        trainer(target, texts, 100, own_embeddings=False).load(file)
    trainer(target, texts, 100, start="a").save(file)
    trainer(target, texts, 100, start="a").load(file)
    for other in ("b", None):
        with pytest.raises(ResumeError, match="other starting weights: a"):
            trainer(target, texts, 100, start=other).load(file)


def test_equal_weights_have_equal_digests_in_every_type(target: FrozenTarget, texts: Texts) -> None:
    head = trainer(target, texts, 1).head.to(torch.bfloat16)
    digest = weights_digest(head)
    assert weights_digest(head.float()) == digest
    with torch.no_grad():
        head.norm.weight[3] += 0.5
    assert weights_digest(head) != digest


def test_the_dropout_of_a_gpu_goes_on(
    target: FrozenTarget, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA dropout draws from the device's generator, not from the CPU's."""
    state, restored = torch.tensor([7, 9], dtype=torch.uint8), list[torch.Tensor]()
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda found, device: restored.append(found))
    saved, again = trainer(target, texts, 100), trainer(target, texts, 100)
    saved._device = again._device = torch.device("cuda")
    saved.save(tmp_path / "run.pt")
    again.load(tmp_path / "run.pt")
    assert [found.tolist() for found in restored] == [[7, 9]]
    trainer(target, texts, 100).load(tmp_path / "run.pt")  # without one there is nothing to restore
    assert len(restored) == 1


def test_a_run_that_was_saved_on_a_gpu_goes_on_without_one(
    target: FrozenTarget, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = trainer(target, texts, 500)
    saved.run()
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        saved.save(tmp_path / "run.pt")
    again = trainer(target, texts, 500)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    again.load(tmp_path / "run.pt")
    for resumed, wanted in zip(weights(again.head), weights(saved.head), strict=True):
        assert torch.equal(resumed, wanted)


def test_a_save_on_a_full_disk_leaves_what_was_saved_before(
    target: FrozenTarget, texts: Texts, tmp_path: Path
) -> None:
    """The fault: half a file stayed, of which the next try had no use and no room beside it."""
    file = tmp_path / "run.pt"
    run = trainer(target, texts, 500)
    run.save(file)
    before = file.read_bytes()
    file.with_name("run.pt.tmp").symlink_to("/dev/full")  # whatever is written there: ENOSPC
    run.run()
    with pytest.raises((OSError, RuntimeError)):  # torch's own, of its writer in C++
        run.save(file)
    assert os.listdir(tmp_path) == ["run.pt"]
    assert file.read_bytes() == before


@pytest.mark.parametrize("left", ["half", "zeros", "nothing", "text"])
def test_a_damaged_file_is_not_taken_up(
    target: FrozenTarget, texts: Texts, tmp_path: Path, left: str
) -> None:
    file = tmp_path / "run.pt"
    trainer(target, texts, 100).save(file)
    whole = file.read_bytes()
    file.write_bytes({
        "half": whole[: len(whole) // 2],
        "zeros": bytes(len(whole)),
        "nothing": b"",
        "text": b"no training",
    }[left])  # fmt: skip
    again = trainer(target, texts, 100)
    before = weights(again.head)
    with pytest.raises(ResumeError, match="damaged"):
        again.load(file)
    assert all(map(torch.equal, weights(again.head), before))


def test_the_targets_distribution_teaches_too(target: FrozenTarget, texts: Texts) -> None:
    options = LoopOptions(batch_tokens=256, k_train=3, loss="distribution")
    first, long = trainer(target, texts, 1, options), trainer(target, texts, 6_000, options)
    first.run()
    long.run()
    assert long.smoothed.mean() < first.smoothed.mean()


def test_a_targets_softcap_reaches_the_loss(
    target: FrozenTarget, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trainer(target, texts, 1)._loss.softcap is None
    monkeypatch.setattr(target, "softcap", 2.0)
    assert trainer(target, texts, 1)._loss.softcap == 2.0


def test_more_partitions_for_longer_texts() -> None:
    counts = [partitions_for(n, 3 * n) for n in (100, 2_000, 20_000, 100_000)]
    assert counts[0] == 1
    assert counts == sorted(counts)
    for n, count in zip((2_000, 20_000, 100_000), counts[1:], strict=True):
        assert (3 * n / count) * (n + 3 * n / count) <= 2**26
        assert count & (count - 1) == 0


def test_sliced_cross_entropy_has_the_exact_gradient() -> None:
    torch.manual_seed(6)
    source, weight = torch.randn(4100, 6, requires_grad=True), torch.nn.Parameter(torch.randn(9, 6))
    labels = torch.randint(9, (4100,))
    wanted = functional.cross_entropy(source @ weight.T, labels)
    gradients = torch.autograd.grad(wanted, [source, weight])
    got = cross_entropy_backward(source * 1.0, weight, labels)
    torch.testing.assert_close(got, wanted.detach())
    torch.testing.assert_close([source.grad, weight.grad], list(gradients))


def test_the_logits_of_a_chunk_are_bounded_whatever_the_vocabulary() -> None:
    sizes = [260, 8_192, 32_000, 49_152, 151_936, 262_144]
    rows = [chunk_rows(size) for size in sizes]
    assert rows == [2048, 2048, 512, 256, 256, 256]
    assert max(size * count for size, count in zip(sizes, rows, strict=True)) * 4 <= 2**28
    assert [bucket(count) for count in rows] == rows  # no row is padding


def selector_trainer(target: FrozenTarget, texts: Texts, head: DraftHead, tokens: int) -> Trainer:
    options = replace(OPTIONS, selector=True, muon_lr=0.02, adam_lr=0.02)
    states = StateStore(target, texts, (0, 1, 2), folder=Path(), limit_bytes=0, with_final=False)
    return Trainer(head, target, texts, states, Progress(tokens=tokens), options)


def test_a_selector_learns_what_a_frozen_head_does_not_know(
    target: FrozenTarget, texts: Texts, tmp_path: Path
) -> None:
    # The head is untrained, but the texts' next tokens follow from the ones before.
    head = trainer(target, texts, 1).head
    head.add_selector(SelectorConfig(8, candidates=64))
    old = {name: value.clone() for name, value in head.state_dict().items()}
    first = selector_trainer(target, texts, head, 1)
    first.run()
    long = selector_trainer(target, texts, head, 15_000)
    long.save(tmp_path / "run.pt")
    long.run()
    assert len(long.loss_per_depth) == OPTIONS.k_train - 1  # none chooses the first draft token
    for early, late in zip(first.loss_per_depth, long.loss_per_depth, strict=True):
        assert 0.0 < late < 0.3 * early
    for name, value in head.state_dict().items():
        assert torch.equal(value, old[name]) != name.startswith("selector."), name
    again = selector_trainer(target, texts, head, 15_000)
    again.load(tmp_path / "run.pt")
    again.run()
    assert torch.equal(again.smoothed, long.smoothed)
