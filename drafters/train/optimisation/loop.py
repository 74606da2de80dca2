"""The training loop of a head, with COD (cod.py); an interrupted run can be resumed."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from drafters.model.head import DraftHead
from drafters.train.data.hidden_states import StateStore
from drafters.train.data.token_sequences import Texts, batches, pad
from drafters.train.optimisation.buckets import bucket
from drafters.train.optimisation.cod import K_TRAIN, RETAIN, sample_chains
from drafters.train.optimisation.loss import DraftLoss, Kind
from drafters.train.optimisation.optimizer import MixedOptimizer, trapezoid
from drafters.train.optimisation.selector_step import accumulate_selector_gradients
from drafters.train.optimisation.step import Batch, accumulate_gradients
from drafters.train.progress import Progress
from drafters.train.runtime import return_memory
from drafters.train.target import FrozenTarget

_RETURN_EVERY = 20  # updates: rare enough to cost nothing
_MOST_SKIPPED = 10  # updates in a row
_MASK_ENTRIES = 2**26  # a partition's attention mask: 64 MiB of booleans, 128 in bf16


# What torch raises for a file of a saved run that is damaged, or not there.
_UNREADABLE = (EOFError, OSError, RuntimeError, ValueError, pickle.UnpicklingError)


class ResumeError(RuntimeError):
    """The saved run had other options, texts or another head than this one."""


def saved_dtype(file: Path) -> str | None:
    """The type that a saved run computes in, such as "bfloat16"; None if there is no such run, or
    one that cannot be read."""
    try:
        state = torch.load(file, weights_only=True, map_location="cpu", mmap=True)
    except _UNREADABLE:
        return None
    name: str | None = state.get("dtype")
    return name


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """The options of a training run."""

    batch_tokens: int = 2048  # padded tokens of an update
    muon_lr: float = 0.02
    adam_lr: float = 2e-3
    k_train: int = K_TRAIN
    retain: float = RETAIN  # 1: full depth, no COD
    loss: Kind = "labels"
    partitions: int = 0  # parts of a sequence's drafts; 0: as few as keep the mask small
    selector: bool = False  # train the head's path selector, and nothing else
    dropout: float = 0.1  # of a path selector's queries
    seed: int = 0


def partitions_for(context: int, drafts: int) -> int:
    """The smallest power of two that bounds a partition's mask `[drafts, context + drafts]`."""
    count = 1
    while (drafts / count) * (context + drafts / count) > _MASK_ENTRIES and count < context:
        count *= 2
    return count


class Trainer:
    """A training run, with all of its state, so that it can be saved and resumed.

    A run with a budget of tokens, resumed from `save`, continues exactly as one that was never
    interrupted; a budget of minutes counts the minutes trained.
    """

    def __init__(
        self,
        head: DraftHead,
        target: FrozenTarget,
        texts: Texts,
        states: StateStore,
        progress: Progress,
        options: LoopOptions,
        start: str | None = None,
    ) -> None:
        """`start` is the digest of a trained head that is trained further (`weights_digest`). A new
        head has none: its weights follow from its config, the target and the seed."""
        if not len(texts):
            raise ValueError("there is no text to train on")
        self.head, self.options, self.progress, self._start = head, options, progress, start
        self._texts, self._states = texts, states
        self._loss = DraftLoss(head, target.lm_head, options.loss, target.softcap)
        self._gradients = accumulate_gradients
        if options.selector:
            self._gradients = accumulate_selector_gradients
            assert head.selector is not None
            head.requires_grad_(False)
            head.selector.requires_grad_(True)
            head.selector.dropout.p = options.dropout
        self._optimizer = MixedOptimizer(head, muon_lr=options.muon_lr, adam_lr=options.adam_lr)
        self._device = target.device
        self._order = torch.Generator().manual_seed(options.seed)
        self._chains = torch.Generator().manual_seed(options.seed + 1)
        self._epoch_state = self._order.get_state()
        self._taken = 0  # batches of the epoch that began at `_epoch_state`
        self._skipped = 0  # updates in a row whose gradient was not finite
        self.smoothed = torch.zeros(options.k_train)
        self._seen = torch.zeros(options.k_train)

    @property
    def loss_per_depth(self) -> list[float]:
        """The smoothed loss of each depth that is trained: of a path selector from the second draft
        token on."""
        losses: list[float] = self.smoothed.tolist()
        return losses[1:] if self.options.selector else losses

    def run(self, file: Path | None = None, save_every: float = 120.0) -> None:
        """Train until the budget is spent; rewrite `file` every `save_every` seconds. Raises
        ValueError if the gradient has stopped being finite. An update whose gradient is not finite
        changes nothing; where it is the last one, further updates tell whether more are so."""
        self.head.train()
        saved = self.progress.seconds
        for indices in self._batches():
            if self.progress.fraction >= 1.0 and not self._skipped:
                break
            self._update(indices)
            if self._skipped >= _MOST_SKIPPED:
                break
            if self.progress.steps % _RETURN_EVERY == 0:
                return_memory()
            due = self.progress.seconds - saved >= save_every
            if file is not None and due and not self._skipped:
                self._save_or_report(file)
                saved = self.progress.seconds
        if self._skipped:
            raise ValueError(
                f"the loss is not finite: give lower rates than --muon-lr {self.options.muon_lr:g} "
                f"and --adam-lr {self.options.adam_lr:g}"
            )
        self.head.eval()

    def _save_or_report(self, file: Path) -> None:
        """Save the run. One that cannot be saved, as on a full disk, goes on."""
        try:
            self.save(file)
        except (OSError, RuntimeError) as error:  # torch raises the latter
            reason = str(error).partition("\n")[0]
            print(f"the run is not saved and goes on: {file}: {reason}", flush=True)

    def save(self, file: Path) -> None:
        """Write the run's state atomically: a kill leaves the old file or the new one, and what
        fails, as on a full disk, leaves nothing unfinished."""
        state = {
            **self._identity(),
            "optimizer": self._optimizer.state_dict(),
            "progress": self.progress.state_dict(),
            "epoch_state": self._epoch_state,
            "taken": self._taken,
            "chains_state": self._chains.get_state(),
            "dropout_state": torch.get_rng_state(),
            "device_dropout_state": (
                torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
            ),
            "smoothed": self.smoothed,
            "seen": self._seen,
            "dtype": str(self.head.fc.weight.dtype).removeprefix("torch."),
        }
        unfinished = file.with_name(file.name + ".tmp")
        try:
            torch.save(state, unfinished)
            os.replace(unfinished, file)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    def load(self, file: Path) -> None:
        """Resume from `save`, on any device. Raises ResumeError if that run had other options,
        texts or another head, or the file is damaged; then nothing has changed."""
        try:
            state: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
        except _UNREADABLE as error:
            raise ResumeError(f"{file} is damaged: {error}") from None
        for name, value in self._identity().items():
            if (saved := state.get(name)) != value:
                raise ResumeError(f"{file} is a saved run with other {name}: {saved}")
        self._optimizer.load_state_dict(state["optimizer"])
        self.progress.load_state_dict(state["progress"])
        self._order.set_state(state["epoch_state"])
        self._taken = state["taken"]
        self._chains.set_state(state["chains_state"])
        torch.set_rng_state(state["dropout_state"])
        device_state = state.get("device_dropout_state")  # None of a run on a CPU
        if device_state is not None and self._device.type == "cuda":
            torch.cuda.set_rng_state(device_state, self._device)
        self.smoothed, self._seen = state["smoothed"], state["seen"]

    def _identity(self) -> dict[str, Any]:
        """What must be equal for this run to continue another."""
        return {
            "options": asdict(self.options),
            "config": asdict(self.head.config),
            "texts": self._texts.sha256,
            "starting weights": self._start,
            "own embeddings": self.head.own_embeddings,
        }

    def _batches(self) -> Iterator[list[int]]:
        while True:
            self._epoch_state = self._order.get_state()
            epoch = list(
                batches(self._texts, tokens=self.options.batch_tokens, generator=self._order)
            )
            for indices in epoch[self._taken :]:
                self._taken += 1
                yield indices
            self._taken = 0

    def _update(self, indices: list[int]) -> None:
        texts = [self._texts[index] for index in indices]
        longest = max(len(text.tokens) for text in texts)
        context = bucket(longest - 1)
        tokens, prompts, ends = pad(texts, context + 1)
        options = self.options
        # All rows have the same anchors, so that one mask serves them all.
        chains = sample_chains(
            max(int(prompts.min()) - 1, 0),
            longest - 3,
            self._chains,
            k_train=options.k_train,
            retain=options.retain,
        )
        states = self._states.fetch(indices)
        batch = Batch(
            tokens.to(self._device),
            prompts.to(self._device),
            ends.to(self._device),
            _widen(states.taps, context),
            _widen(states.final, context) if options.loss == "distribution" else None,
        )
        drafts = sum(map(len, chains))
        losses = self._gradients(
            self._loss,
            batch,
            [chain.to(self._device) for chain in chains],
            options.partitions or partitions_for(context, drafts),
        )
        norm = self._optimizer.step(trapezoid(self.progress.fraction))
        if math.isfinite(norm):
            self._skipped = 0
            counts = losses.counts.cpu()
            self._seen += counts > 0
            weight = torch.clamp(1.0 / self._seen.clamp(min=1), min=0.02) * (counts > 0)
            self.smoothed += weight * (losses.means.cpu() - self.smoothed)
        else:
            self._skipped += 1
        # Tokens outside of the draft vocabulary count too, as they do in a budget of epochs.
        self.progress.advance(
            sum(text.drafted_tokens for text in texts),
            loss=float(losses.sums.sum() / losses.counts.sum().clamp(min=1)),
            first=self.loss_per_depth[0],
            last=self.loss_per_depth[-1],
            norm=norm,
        )


def _widen(states: torch.Tensor, width: int) -> torch.Tensor:
    """[rows, n, size] -> [rows, width, size], cut or padded with zeros."""
    return functional.pad(states, (0, 0, 0, width - states.shape[1]))
