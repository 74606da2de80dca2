"""The training loop of a P-EAGLE head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from drafters.model.llama import Llama
from drafters.model.peagle import PEagleHead
from drafters.train.cod import K_TRAIN, RETAIN, sample_chains
from drafters.train.loss import head_loss_backward
from drafters.train.mask import attention_mask
from drafters.train.optimizer import MixedOptimizer, trapezoid
from drafters.train.progress import Progress
from drafters.train.rollouts import Rollout
from drafters.train.slots import Slots, head_inputs, lay_out

IGNORED = -100


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """What a run may vary; the defaults are the embedded head's."""

    batch_rows: int = 8
    muon_lr: float = 0.02
    adam_lr: float = 2e-3
    k_train: int = K_TRAIN
    retain: float = RETAIN
    seed: int = 0


def shuffled(
    rollouts: Sequence[Rollout], rows: int, generator: torch.Generator
) -> Iterator[Rollout]:
    """Endless batches of up to `rows` rows; every row once an epoch, cut to the longest valid."""
    while True:
        pieces: list[Rollout] = []
        for rollout in rollouts:
            order = torch.randperm(len(rollout.tokens), generator=generator)
            for part in order.split(rows):
                ends = rollout.ends[part]
                longest = int(ends.max())
                pieces.append(Rollout(rollout.tokens[part, :longest], rollout.prompt, ends))
        for index in torch.randperm(len(pieces), generator=generator).tolist():
            yield pieces[index]


def labels_of(batch: Rollout, slots: Slots) -> torch.Tensor:
    """Token that each element should predict, IGNORED inside the prompt and past the end.

    The prompt is context only: serving never drafts inside it.  [rows, elements]
    """
    length = batch.tokens.shape[1]
    where = slots.predicted
    inside = (where >= batch.prompt + 1) & (where < length)
    labels = batch.tokens[:, where.clamp(max=length - 1)]
    valid = inside[None] & (where[None] < batch.ends[:, None])
    return labels.masked_fill(~valid, IGNORED)


def train_head(
    head: PEagleHead,
    target: Llama,
    rollouts: Sequence[Rollout],
    progress: Progress,
    options: LoopOptions,
) -> list[float]:
    """Run the budget down; returns the smoothed loss of each depth."""
    generator = torch.Generator().manual_seed(options.seed)
    optimizer = MixedOptimizer(head, muon_lr=options.muon_lr, adam_lr=options.adam_lr)
    taps = head.config.eagle_aux_hidden_state_layer_ids
    source = shuffled(rollouts, options.batch_rows, generator)
    smoothed = torch.zeros(options.k_train)
    head.train()
    while progress.fraction < 1.0:
        batch = next(source)
        context = batch.tokens.shape[1] - 1  # entries: token p + 1 with the state at p
        chains = sample_chains(
            batch.prompt - 1,
            context - 2,
            generator,
            k_train=options.k_train,
            retain=options.retain,
        )
        slots = lay_out(context, chains)
        positions = torch.arange(context).expand(len(batch.tokens), -1)
        causal = torch.ones(1, context, context, dtype=torch.bool).tril()
        with torch.no_grad():
            _, states = target(batch.tokens[:, :-1], positions, causal, taps)
        assert states is not None
        ids, hidden, where = head_inputs(
            slots,
            batch.tokens,
            head.fuse(states),
            head.fuse(head.mask_hidden),
            head.config.ptd_token_id,
        )
        output = head(ids, hidden, where, attention_mask(slots)[None])
        labels = labels_of(batch, slots)
        losses = head_loss_backward(output, target.lm_head, labels, slots.depths, options.k_train)
        norm = optimizer.step(trapezoid(progress.fraction))
        smoothed += max(0.02, 1.0 / (progress.steps + 1)) * (losses - smoothed)
        progress.advance(
            int((labels[:, :context] != IGNORED).sum()),
            loss=float(losses.mean()),
            first=float(smoothed[0]),
            last=float(smoothed[-1]),
            norm=norm,
        )
    head.eval()
    return smoothed.tolist()
