"""Training: the loss falls, labels are where serving needs them, gradients are exact."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn import functional

from drafters.model.llama import Llama
from drafters.model.peagle import PEagleHead
from drafters.train.loop import IGNORED, LoopOptions, labels_of, train_head
from drafters.train.loss import cross_entropy_backward, head_loss_backward
from drafters.train.progress import Progress
from drafters.train.rollouts import Rollout, load_rollouts, save_rollouts, valid_lengths
from drafters.train.slots import lay_out


def test_head_learns_text_with_a_period(pair: tuple[Llama, PEagleHead]) -> None:
    target, head = pair
    offsets = torch.arange(6)[:, None]
    tokens = 4 + (torch.arange(40)[None] + offsets) % 6
    rollout = Rollout(tokens, 8, torch.full((6,), 40))
    options = LoopOptions(batch_rows=6, k_train=4, muon_lr=0.1, adam_lr=0.05)
    before = train_head(head, target, [rollout], Progress(tokens=1), options)
    train_head(head, target, [rollout], Progress(tokens=12_000), options)
    after = train_head(head, target, [rollout], Progress(tokens=1), options)
    # Each depth on its own: an unreachable depth keeps its loss and hides in the mean.
    assert all(late < 0.5 * early for early, late in zip(before, after, strict=True))


def test_mask_hidden_and_embeddings_are_trained(pair: tuple[Llama, PEagleHead]) -> None:
    target, head = pair
    rollout = Rollout(torch.arange(4, 20)[None].repeat(2, 1), 4, torch.tensor([16, 16]))
    old = {name: value.clone() for name, value in head.state_dict().items()}
    train_head(head, target, [rollout], Progress(tokens=1), LoopOptions(k_train=3))
    same = [name for name, value in head.state_dict().items() if torch.equal(old[name], value)]
    assert same == []


def test_labels_skip_the_prompt_and_the_text_behind_the_end() -> None:
    batch = Rollout(torch.arange(8)[None] + 10, prompt=4, ends=torch.tensor([7]))
    labels = labels_of(batch, lay_out(7, [torch.tensor([3, 4]), torch.tensor([3])]))
    # Entry p predicts token p + 2. The first draft follows token 4, the first generated one.
    assert labels[0, :7].tolist() == [IGNORED, IGNORED, IGNORED, 15, 16, IGNORED, IGNORED]
    assert labels[0, 7:].tolist() == [16, IGNORED, IGNORED]


def test_rollouts_survive_a_file(tmp_path: Path) -> None:
    first = Rollout(torch.arange(12).view(2, 6), 2, torch.tensor([6, 4]))
    second = Rollout(torch.arange(5).view(1, 5) + 8000, 3, torch.tensor([5]))
    save_rollouts([first, second], tmp_path / "a.safetensors")
    again = load_rollouts([tmp_path / "a.safetensors"])
    assert [item.prompt for item in again] == [2, 3]
    for old, new in zip([first, second], again, strict=True):
        assert torch.equal(old.tokens, new.tokens)
        assert torch.equal(old.ends, new.ends)


def test_valid_length_includes_the_end_token() -> None:
    text = torch.tensor([[5, 2, 7, 2], [5, 5, 5, 5], [0, 1, 1, 1]])
    assert valid_lengths(text, [2, 0]).tolist() == [2, 4, 1]


def test_sliced_cross_entropy_has_the_exact_gradient() -> None:
    torch.manual_seed(6)
    source, weight = torch.randn(4100, 6, requires_grad=True), torch.nn.Parameter(torch.randn(9, 6))
    labels = torch.randint(9, (4100,))
    wanted = functional.cross_entropy(source @ weight.T, labels)
    gradients = torch.autograd.grad(wanted, [source, weight])
    got = cross_entropy_backward(source * 1.0, weight, labels)
    torch.testing.assert_close(got, wanted.detach())
    torch.testing.assert_close([source.grad, weight.grad], list(gradients))


def test_head_loss_reports_each_depth_and_ignores_the_rest() -> None:
    torch.manual_seed(7)
    source, weight = torch.randn(2, 3, 6, requires_grad=True), torch.randn(9, 6)
    labels = torch.tensor([[1, 2, IGNORED], [IGNORED, 4, 5]])
    depths = torch.tensor([0, 1, 1])
    losses = functional.cross_entropy(
        (source @ weight.T).flatten(0, 1), labels.flatten(), reduction="none"
    ).view(2, 3)
    (gradient,) = torch.autograd.grad(losses.sum() / 4, [source])
    got = head_loss_backward(source * 1.0, weight, labels, depths, 3)
    expected = torch.stack([losses[0, 0], (losses[0, 1] + losses[1, 1] + losses[1, 2]) / 3])
    torch.testing.assert_close(got[:2], expected.detach())
    assert got[2] == 0  # a depth without elements
    torch.testing.assert_close(source.grad, gradient)
