"""A round of the learner: captured sequences become a generation, in phases.

    choose    the texts: captured ones, and those of the mix; an eighth of both is held back
    train     the head in force is trained on, as `aerie train --init` does
    select    so is its path selector, which would read other states than it was trained on
    compare   the candidate with the head in force, on what was held back
    add       the generation, with all that is known of it

Each phase leaves its result in the round's folder, where it appears whole. After a kill the phases
that are complete are not repeated, and training goes on from where it was saved.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any

import torch

from drafters.learning import captured
from drafters.learning.captured import Captured
from drafters.learning.json_file import read_json, replace_json
from drafters.learning.lineage import CANDIDATE, REFUSED, STARTED_WITH, Generation, Lineage
from drafters.model.checkpoint import save_head
from drafters.model.head import DraftHead
from drafters.train.data.hidden_states import StateStore
from drafters.train.data.mix import FILE as MIX_FILE
from drafters.train.data.token_sequences import Text, Texts
from drafters.train.learner.proof import CandidateReplay, Judged, replay
from drafters.train.learner.round_folder import SAVED, UNFINISHED, RoundFolder
from drafters.train.learner.sequences import (
    HELD_BACK,
    HELD_BACK_OF_TENANT,
    JUDGED_TOKENS,
    choose,
    is_held_back,
)
from drafters.train.learner.texts import (
    answer_mark,
    mean_log_probabilities,
    mix_of,
    taken,
    text_of,
    within_prompt_tokens,
)
from drafters.train.learner.vocabulary import VocabularyChange, vocabulary_change
from drafters.train.optimisation.head_init import (
    known_head,
    replace_draft_tokens,
    weights_digest,
)
from drafters.train.optimisation.loop import LoopOptions, ResumeError, Trainer
from drafters.train.progress import Progress
from drafters.train.provenance import run_record
from drafters.train.runtime import prepare_cpu
from drafters.train.target import FrozenTarget
from drafters.train.template_option import set_template

_TRAINED, _CANDIDATE = "trained", "candidate"
_TEXTS, _HELD_BACK = "texts.safetensors", "held-back.safetensors"
_ROWS_TO_FIT = 4  # times the target's hidden size: rows that a new token's row is made from
# Tokens of prompts for each token of answers that a round may use. The target reads them two or
# three times, and they teach nothing: a service of long prompts and short answers would take days.
_PROMPT_TOKENS = 10
# Texts of the mix that are held back and replayed: their ratio is then good to 0.6% (95%), and a
# candidate is refused below 0.98. All 101 of the default head's took a third of a small round.
_JUDGED_OF_MIX = 48
_LEAST_CONVERSATIONS = 2  # that are held back: of a single one the replay has no interval
_KEPT_SHARE = 0.5  # of what a round changed in the weights (decision 0037)
_SAVE_S = 60.0  # between two savings of the training: the most that a kill loses
_REPORT_S = 60.0  # between two lines of progress
# Of the training of the head; those of its selector are those of docs/train-selector.md.
_HEAD = LoopOptions(retain=0.7)
_SELECTOR = LoopOptions(
    batch_tokens=1024, retain=0.7, adam_lr=1e-3, loss="distribution", selector=True
)


class Round:
    """One round, which may have been begun by a process that was killed."""

    def __init__(self, args: argparse.Namespace, work: RoundFolder) -> None:
        self._args, self._work = args, work
        self._lineage = Lineage(args.folder)
        prepare_cpu(args.threads)

    def run(self) -> Generation:
        """Make a generation. Raises OSError, RuntimeError and ValueError."""
        plan = self._work.plan() or self._choose()
        made = self._already_added(plan)
        if made is None:
            self._train(plan)
            self._select(plan)
            made = self._add(plan)
        self._work.finish(plan["until"])
        self._lineage.prune()
        return made

    @cached_property
    def _target(self) -> FrozenTarget:
        device = self._args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        target = FrozenTarget.load_for_training(self._args.target, device=device)
        set_template(target.tokenizer, self._args)
        return target

    def _head_of(self, number: int) -> Path:
        """The folder of a generation's head."""
        if number == STARTED_WITH:
            return Path(self._args.head)
        return self._lineage.generation(number).folder

    def _in_force(self) -> int:
        """The number of the generation that drafts; of the first head if its weights are gone."""
        pinned = self._lineage.pinned()
        number = self._lineage.in_force() if pinned is None else pinned
        there = {item.number for item in self._lineage.generations() if item.has_weights}
        return number if number in there else STARTED_WITH

    def _choose(self) -> dict[str, Any]:
        """Write the texts of a new round and its plan. Raises ValueError if there are too few; they
        are not new any more then."""
        folder, args, shape = self._work.clear(), self._args, self._target.shape
        target_since = self._lineage.target_since()
        choice = choose(
            captured.read(args.folder / captured.FOLDER, target_since),
            answer_tokens=args.answer_tokens,
            vocabulary=shape.vocab_size,
            max_length=min(args.max_length, shape.max_position_embeddings),
            answer_mark=answer_mark(self._target.tokenizer, args.chat_template_kwargs),
        )
        budget = _PROMPT_TOKENS * args.answer_tokens
        chosen = within_prompt_tokens(choice.trained, budget)
        judged = within_prompt_tokens(choice.held_back, budget // HELD_BACK, HELD_BACK_OF_TENANT)
        sequences = chosen + judged
        beyond = len(choice.trained) + len(choice.held_back) - len(sequences)
        until = max(choice.until, target_since)  # what another target wrote is not new any more
        until = min(until, time.time())  # a clock that was wrong must not end all rounds
        probable = self._probable(sequences)
        improbable = len(sequences) - sum(probable)
        left_out = choice.left_out + Counter({"improbable": improbable, "prompt tokens": beyond})
        trained = list(compress(chosen, probable[: len(chosen)]))
        held_back = list(compress(judged, probable[len(chosen) :]))
        conversation_of = dict(zip(map(id, choice.held_back), choice.conversations, strict=True))
        conversations = [conversation_of[id(item)] for item in held_back]
        kept = trained + held_back
        if not trained or len(set(conversations)) < _LEAST_CONVERSATIONS:
            self._work.finish(until)
            raise ValueError(f"too little can be learned from: {dict(left_out)} left out")
        texts = [text_of(item) for item in trained]
        tokens = sum(len(item.answer) for item in trained)
        seed = int(until)
        mix = mix_of(self._target, args, seed)
        usable = [text for text in mix if not is_held_back(text.tokens[: text.prompt].tolist())]
        mixed = taken(usable, tokens * args.mix_share / (1.0 - args.mix_share))
        apart = [
            Text(text.tokens[: text.prompt + JUDGED_TOKENS], text.prompt)
            for text in mix
            if is_held_back(text.tokens[: text.prompt].tolist())
        ][:_JUDGED_OF_MIX]
        Texts.of(texts + mixed).save(folder / _TEXTS)
        Texts.of([*map(text_of, held_back), *apart]).save(folder / _HELD_BACK)
        parent = self._in_force()
        change = self._vocabulary_change(parent, texts, usable)
        plan = {
            "round": f"{time.time_ns():x}",
            "until": until,
            "began": time.time(),
            "parent": parent,
            "draft_vocabulary": asdict(change),
            "seed": seed,
            "held_back_of": [item.tenant for item in held_back],
            "conversations": conversations,
            "data": {
                "sequences": len(trained),
                "tokens": tokens,
                "held_back": len(held_back),
                "held_back_by": _held_back_by(item.tenant in choice.by_answer for item in kept),
                "mixed": len(mixed),
                "new_draft_tokens": len(change.added),
                "from": _when(min(item.at for item in kept)),
                "to": _when(max(item.at for item in kept)),
                "served": _served(kept),
                "tenants": _tokens_by_tenant(trained),
                "left_out": dict(left_out),
            },
        }
        self._work.check_head(args.head)  # the gateway may have been started anew meanwhile
        self._work.begin(plan)
        return plan

    def _probable(self, sequences: Sequence[Captured]) -> list[bool]:
        """Which answers the target could have written."""
        means = mean_log_probabilities(self._target, Texts.of(map(text_of, sequences)))
        return [mean >= self._args.least_log_probability for mean in means]

    def _vocabulary_change(
        self, parent: int, captured: Sequence[Text], mix: Sequence[Text]
    ) -> VocabularyChange:
        """Which tokens the candidate drafts otherwise than its parent. None where that may draft
        all; without a mix, as nothing would say what else is common; and where there are too few
        rows to make new ones from."""
        head = known_head(self._target, self._head_of(parent), self._target.dtype)
        size = head.config.draft_vocab_size or 0
        if not mix or size < _ROWS_TO_FIT * head.config.target_hidden_size:
            return VocabularyChange([], [])
        drafted = torch.zeros(self._target.shape.vocab_size, dtype=torch.bool)
        drafted[head.to_target(torch.arange(size, device=self._target.device)).cpu()] = True
        return vocabulary_change(drafted, captured, mix, self._target.end_tokens)

    def _train(self, plan: dict[str, Any]) -> None:
        """Train the parent's head on."""
        if any((self._work.round / name).exists() for name in (_TRAINED, _CANDIDATE)):
            return
        args = self._args
        head = known_head(self._target, self._head_of(plan["parent"]), self._target.dtype)
        if (change := plan.get("draft_vocabulary")) and change["added"]:
            replace_draft_tokens(head, self._target, change["added"], change["dropped"])
        self._spare_copies(head)
        options = replace(
            _HEAD, k_train=args.k, muon_lr=args.muon_lr, adam_lr=args.adam_lr, seed=plan["seed"]
        )
        self._run(head, options, args.epochs, _TRAINED)

    def _spare_copies(self, head: DraftHead) -> None:
        """Leave a head's copies of the target's matrices as they are: the engine has the target's
        in their place, and refuses others (drafters/vllm/head_swap.py)."""
        target = self._target
        for own, theirs in ((head.embed_tokens, target.embeddings), (head.lm_head, target.lm_head)):
            if own is not None and torch.equal(own.weight, theirs.to(own.weight.dtype)):
                own.requires_grad_(False)

    def _select(self, plan: dict[str, Any]) -> None:
        """Train the head's path selector on, if it has one."""
        trained, candidate = self._work.round / _TRAINED, self._work.round / _CANDIDATE
        if candidate.exists():
            return
        head = known_head(self._target, trained, self._target.dtype)
        if head.selector is None or self._args.k < 2:
            os.rename(trained, candidate)
            return
        options = replace(_SELECTOR, k_train=self._args.k, seed=plan["seed"])
        self._run(head, options, self._args.selector_epochs, _CANDIDATE)

    def _run(self, head: DraftHead, options: LoopOptions, epochs: float, name: str) -> None:
        """Train a head or its selector, and keep it under `name`."""
        folder = self._work.round
        texts = Texts.load(folder / _TEXTS)
        states = StateStore(
            self._target,
            texts,
            head.config.eagle_aux_hidden_state_layer_ids,
            folder=folder,
            limit_bytes=0,  # one pass reads them once: to keep them would save nothing
            with_final=options.loss == "distribution",
        )
        drafted = sum(text.drafted_tokens for text in texts)
        progress = Progress(tokens=max(round(epochs * drafted), 1), every=_REPORT_S)
        start = weights_digest(head)
        initial = {name: value.detach().clone() for name, value in head.named_parameters()}
        trainer = Trainer(head, self._target, texts, states, progress, options, start)
        saved = folder / f"{SAVED}{name}.pt"
        if saved.exists():
            try:
                trainer.load(saved)
            except ResumeError as error:  # such as another K: this phase begins anew
                print(f"learner: begun anew: {error}", file=sys.stderr, flush=True)
                saved.unlink()
        trainer.run(saved, _SAVE_S)
        _go_half_way_back(head, initial)
        replace_json(folder / f"{name}.json", {
            "steps": progress.steps,
            "anchors": progress.tokens,
            "loss": options.loss,
            "loss_per_depth": [round(loss, 4) for loss in trainer.loss_per_depth],
        })  # fmt: skip
        made = folder / f"{name}{UNFINISHED}"
        shutil.rmtree(made, ignore_errors=True)
        save_head(head.to(self._target.stored), made)
        self._work.keep(made, name)
        saved.unlink(missing_ok=True)

    def _compare(self, plan: dict[str, Any], in_force: int) -> CandidateReplay:
        texts = list(Texts.load(self._work.round / _HELD_BACK))
        tenants = plan["held_back_of"]
        captured = Judged(texts[: len(tenants)], tenants, plan.get("conversations"))
        heads = self._head_of(in_force), self._work.round / _CANDIDATE
        first = None if in_force == STARTED_WITH else self._head_of(STARTED_WITH)
        return replay(self._target, heads, captured, texts[len(tenants) :], self._args.k, first)

    def _add(self, plan: dict[str, Any]) -> Generation:
        """Compare the candidate with the head that is in force now, and add it. Raises ValueError
        if the gateway has another first head or target since the round began."""
        in_force = self._in_force()
        found = self._compare(plan, in_force)
        objection = found.objection()
        args = self._args
        facts = {
            "verdict": REFUSED if objection else CANDIDATE,
            "reason": objection,
            "round": plan["round"],
            "parent": plan["parent"],
            "data": plan["data"],
            "training": read_json(self._work.round / f"{_TRAINED}.json"),
            "selector_training": read_json(self._work.round / f"{_CANDIDATE}.json"),
            "k": args.k,
            "muon_lr": args.muon_lr,
            "adam_lr": args.adam_lr,
            "target_sha256": self._target.fingerprint,
            "began": _when(plan["began"]),
            "seconds": round(time.time() - plan["began"], 1),
            "replay": {"against": in_force, "k": args.k, **found.figures()},
        }
        record = run_record(["aerie learn"], plan["seed"], facts)
        if (texts := Path(args.head) / MIX_FILE).is_file():  # for whoever learns on from this one
            shutil.copyfile(texts, self._work.round / _CANDIDATE / MIX_FILE)
        if self._work.plan() is None:
            raise ValueError("the gateway was started with another head or target meanwhile")
        return self._lineage.add(self._work.round / _CANDIDATE, record)

    def _already_added(self, plan: dict[str, Any]) -> Generation | None:
        """The generation of this round, if a kill came between adding it and ending the round."""
        made = (item for item in self._lineage.generations()
                if item.provenance.get("round") == plan["round"])  # fmt: skip
        return next(made, None)


@torch.no_grad()
def _go_half_way_back(head: DraftHead, initial: Mapping[str, torch.Tensor]) -> None:
    """Go half of the way back to the weights before training: about half of what a round learns
    stays, and it forgets nothing (weights interpolated as in arXiv 2109.01903)."""
    for name, value in head.named_parameters():
        value.lerp_(initial[name], 1.0 - _KEPT_SHARE)


def _held_back_by(by_answer: Iterable[bool]) -> str:
    """What decided which sequences are held back; "both" where it differs between tenants."""
    kinds = set(by_answer)
    return "both" if len(kinds) > 1 else "prompt and answer" if True in kinds else "prompt"


def _served(sequences: Iterable[Captured]) -> dict[str, dict[str, int]]:
    """By the generation that drafted, how many of the head's drafts were verified while these were
    served, and how many of their tokens were accepted."""
    found: dict[str, dict[str, int]] = {}
    for sequence in sequences:
        accepted = [right for drafted, right in sequence.steps if drafted]
        counts = found.setdefault(str(sequence.generation), {"drafts": 0, "accepted": 0})
        counts["drafts"] += len(accepted)
        counts["accepted"] += sum(accepted)
    return found


def _tokens_by_tenant(sequences: Sequence[Captured]) -> dict[str, int]:
    tokens: defaultdict[str, int] = defaultdict(int)
    for sequence in sequences:
        tokens[sequence.tenant] += len(sequence.answer)
    return dict(tokens)


def _when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
