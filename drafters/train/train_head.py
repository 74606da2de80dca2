"""Train a draft head for a target on the target's own responses to your prompts.

The target answers the prompts (in this process, or on a server that you name), its hidden states
are computed once and kept on disk up to a limit, and a P-EAGLE or EAGLE-3 head is trained on them.
The result is a folder that `aerie serve --drafter` and vLLM load. A run that was interrupted
continues where it stopped when the same command is given again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from drafters.model.checkpoint import add_selector_file, save_head
from drafters.model.config import Method, SelectorConfig
from drafters.model.head import DraftHead
from drafters.model.head_check import SELECTOR
from drafters.model.speculators import save_speculators
from drafters.packaged import resolve
from drafters.train.data.examples import encode_examples, read_examples
from drafters.train.data.hidden_states import StateStore
from drafters.train.data.mix import FILE as MIX_FILE
from drafters.train.data.mix import load_mix, save_mix
from drafters.train.data.response_cache import ResponseCache, numbered
from drafters.train.data.responses import (
    KEY_VARIABLE,
    ResponseServerError,
    respond,
    respond_by_server,
)
from drafters.train.data.token_sequences import Text, Texts
from drafters.train.optimisation.head_init import (
    HeadPlan,
    check_vocabulary_size,
    fitting_head,
    frequent_tokens,
    known_head,
    mask_token_of,
    new_head,
    new_selector,
    planned_config,
    weights_digest,
)
from drafters.train.optimisation.loop import LoopOptions, ResumeError, Trainer, saved_dtype
from drafters.train.progress import Progress
from drafters.train.provenance import read_provenance, write_provenance
from drafters.train.runtime import prepare_cpu
from drafters.train.target import FrozenTarget, checkpoint_folder
from drafters.train.template_option import set_template
from drafters.train.train_options import learning_rates, train_parser

# Options that shape a new head; each is None unless it is given.
_SHAPE = (
    "method", "layers", "taps", "intermediate_size", "embeddings", "draft_vocab", "mask_token",
)  # fmt: skip
_GIB = 2**30
_PART = 512  # prompts whose responses are written to disk together


def main(argv: Sequence[str] | None = None) -> int:
    """Run `aerie train`; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = train_parser(__doc__).parse_args(argv)
    try:
        _run(args, argv)
    except (
        ResponseServerError, ResumeError, ValueError, OSError, torch.OutOfMemoryError,
    ) as error:  # fmt: skip
        print(f"aerie train: {error}", file=sys.stderr)
        return 1
    return 0


def _run(args: argparse.Namespace, argv: list[str]) -> None:
    prepare_cpu(args.threads)
    work = args.work or args.out.with_name(args.out.name + ".work")
    work.mkdir(parents=True, exist_ok=True)
    saved = work / f"resume-{args.out.name}.pt"
    dtype = _working_dtype(saved, args)
    print(f"target: loading {args.target}", flush=True)
    target = FrozenTarget.load_for_training(args.target, dtype=dtype, device=args.device)
    if target.dtype == torch.float16:
        raise ValueError(
            f"{args.target} is loaded in float16, in which small gradients vanish: give --dtype "
            "bfloat16 or float32, or the checkpoint that it was quantised from"
        )
    set_template(target.tokenizer, args)
    _check_options(target, args)
    if args.loss is None:
        args.loss = "distribution" if args.selector else "labels"
    old_mix = load_mix(args.init) if args.init and not args.selector else []
    texts = _responses(target, _prompts(target, work, args), work, args)
    head, start = _head(target, texts, args)
    taps = head.config.eagle_aux_hidden_state_layer_ids
    states = StateStore(
        target,
        texts,
        taps,
        folder=work,
        limit_bytes=round(args.cache_gib * _GIB),
        with_final=args.loss == "distribution",
    )
    total = int(texts.lengths.sum())
    extraction = Progress(tokens=total)
    states.prepare(extraction.advance)
    print(f"states: {states.cached} of {len(texts)} texts cached, {states.bytes / _GIB:.2f} GiB")
    progress = Progress(minutes=args.minutes, tokens=_token_budget(texts, args))
    muon_lr, adam_lr = learning_rates(args)
    options = LoopOptions(
        batch_tokens=args.batch_tokens,
        muon_lr=muon_lr,
        adam_lr=adam_lr,
        k_train=args.k_train,
        retain=args.retain,
        loss=args.loss,
        partitions=args.partitions,
        selector=args.selector,
        dropout=args.dropout,
        seed=args.seed,
    )
    trainer = Trainer(head, target, texts, states, progress, options, start)
    if saved.exists() and not args.restart:
        trainer.load(saved)
        print(f"resumed at step {progress.steps}, {100 * progress.fraction:.1f}% of the budget")
    print(_describe(head, texts, args), flush=True)
    trainer.run(saved)
    if not args.dtype:
        head = head.to(target.stored)
    write_provenance(_save(head, args), ["aerie train", *argv], args.seed, {
        "method": head.config.method,
        "path_selector": head.config.path_selector and asdict(head.config.path_selector),
        "target_sha256": target.fingerprint,
        "data_sha256": texts.sha256,
        "k_train": args.k_train,
        "retain": args.retain,
        "loss": args.loss,
        "muon_lr": muon_lr,
        "adam_lr": adam_lr,
        "rows": len(texts),
        "tokens": progress.tokens,
        "steps": progress.steps,
        "minutes": round(progress.seconds / 60, 1),
        "init": read_provenance(args.init),
        "loss_per_depth": [round(loss, 4) for loss in trainer.loss_per_depth],
    })  # fmt: skip
    mix = args.out / MIX_FILE
    if args.no_mix:
        mix.unlink(missing_ok=True)
    elif not args.selector:  # the copy of a head keeps the texts of that head
        save_mix(texts, args.out, old=old_mix)
    saved.unlink(missing_ok=True)
    print("loss per depth: " + " ".join(f"{loss:.3f}" for loss in trainer.loss_per_depth))
    if mix.is_file():
        print(f"{mix} holds texts of its training: leave it out where those must not be published")
    print(f"wrote {args.out}; next: aerie evaluate --target {args.target} --head {args.out}")


def _working_dtype(saved: Path, args: argparse.Namespace) -> torch.dtype | None:
    """The type of --dtype, else that of the run that is continued, if there is one: on a CPU the
    faster type is measured, and may be another at the next start. Raises ResumeError if the two
    differ."""
    name = None if args.restart else saved_dtype(saved)
    if name and args.dtype and args.dtype != name:
        raise ResumeError(f"{saved} is a saved run with other dtype: {name}")
    name = args.dtype or name
    return getattr(torch, name) if name else None


def _save(head: DraftHead, args: argparse.Namespace) -> Path:
    """Write the head, or its path selector; returns the folder for the record of the run."""
    if args.selector:
        add_selector_file(head, args.init, args.out)
        return Path(args.out) / SELECTOR
    if args.layout == "speculators":
        # vLLM starts the target that is named, and knows no packaged ones.
        target = resolve(args.target)
        save_speculators(head, args.out, target=target, draft_tokens=args.k_train)
    else:
        save_head(head, args.out)
    return Path(args.out)


def _prompts(target: FrozenTarget, work: Path, args: argparse.Namespace) -> list[list[int]]:
    """Token ids of all prompts that leave room for a response."""
    room = args.max_length - args.response_tokens
    examples = read_examples(args.prompts, malformed=args.malformed)
    prompts, too_long = encode_examples(
        examples,
        target.tokenizer,
        max_tokens=room,
        template_kwargs=_clock(target.tokenizer, work) | args.chat_template_kwargs,
        malformed=args.malformed,
    )
    if too_long:
        print(f"prompts: {too_long} of {len(examples)} are longer than {room} tokens: left out")
    if not prompts:
        raise ValueError("no prompt is left; see --max-length and --response-tokens")
    return prompts


def _clock(tokenizer: Any, work: Path) -> dict[str, Any]:
    """For a template that writes the date, an argument in the place of transformers' function: with
    the time of the first run in this folder. On another day the prompts would be other ones, and
    all of them would be answered again."""
    if "strftime_now" not in str(tokenizer.chat_template):
        return {}
    file = work / "began.txt"
    try:
        began = datetime.fromisoformat(file.read_text())
    except (FileNotFoundError, ValueError):  # the latter of what a kill left empty
        began = datetime.now()
        file.write_text(began.isoformat())
    return {"strftime_now": began.strftime}


def _responses(
    target: FrozenTarget, prompts: list[list[int]], work: Path, args: argparse.Namespace
) -> Texts:
    """The target's answers to all prompts, reusing those that an earlier run has written."""
    kinds = []
    for temperature, part in _by_temperature(prompts, args):
        seed = args.seed if temperature else None
        kind = f"{target.fingerprint} {args.response_tokens} {temperature} {seed}"
        folder = work / f"responses-{hashlib.sha256(kind.encode()).hexdigest()[:16]}"
        cache = ResponseCache(folder)
        kinds.append((temperature, part, cache, cache.missing(part)))
    count = sum(len(missing) for _, _, _, missing in kinds)
    print(f"responses: {len(prompts)} prompts, up to {args.response_tokens} tokens each; "
          f"{len(prompts) - count} of {len(prompts)} are answered already")  # fmt: skip
    progress = Progress(tokens=max(count * args.response_tokens, 1))
    responses: list[Text] = []
    for temperature, part, cache, missing in kinds:
        for start in range(0, len(missing), _PART):
            unanswered = missing[start : start + _PART]
            first = unanswered[0]
            chance = random.Random(f"{args.seed} {first.digest.hex()} {first.repetition}")
            prompts_of_part = [list(each.prompt) for each in unanswered]
            seed = chance.randrange(2**31)
            cache.add(
                unanswered, _answers(target, prompts_of_part, temperature, seed, args, progress)
            )
        responses += cache.responses(part)
    # A response of one token has nothing to draft: the target writes the first token itself.
    texts = Texts.of(text for text in responses if len(text.tokens) > text.prompt + 1)
    if not len(texts):
        raise ValueError("the target answers nothing: every response ends with its first token")
    return texts


def _by_temperature(
    prompts: list[list[int]], args: argparse.Namespace
) -> list[tuple[float, list[list[int]]]]:
    """The prompts that are answered greedily, and those whose answers are sampled.

    A prompt itself decides, by chance, and not its place among others.
    """
    greedy, sampled = list[list[int]](), list[list[int]]()
    for prompt, each in zip(prompts, numbered(prompts), strict=True):
        chance = random.Random(f"{args.seed} {each.repetition} {each.digest.hex()}").random()
        (sampled if chance < args.sampled_share else greedy).append(prompt)
    return [(0.0, greedy), (args.temperature, sampled)]


def _answers(
    target: FrozenTarget,
    prompts: list[list[int]],
    temperature: float,
    seed: int,
    args: argparse.Namespace,
    progress: Progress,
) -> Iterator[Text]:
    options = {
        "steps": args.response_tokens,
        "temperature": temperature,
        "seed": seed,
        "progress": progress.advance,
    }
    if args.server:
        key = os.environ.get(KEY_VARIABLE) or None
        answers = respond_by_server(args.server, None, prompts, key=key, **options)
    else:
        answers = respond(target, prompts, **options)
    return (text for _, text in answers)


def _check_options(target: FrozenTarget, args: argparse.Namespace) -> None:
    """Raise ValueError for what would end the run behind hours of answers: options, and a head of
    --init, that do not fit each other or the target."""
    if args.out.resolve() == checkpoint_folder(args.target).resolve():
        raise ValueError("--out is the folder of the target, whose weights it would replace")
    if args.selector and (args.init is None or args.layout != "flat"):
        raise ValueError("--selector is for the head of --init, and keeps its layout")
    if args.selector and args.k_train < 2:
        raise ValueError("--selector: a single draft token has no path; give --k-train 2 or more")
    if args.init is None:
        size = args.draft_vocab
        if size:
            check_vocabulary_size(size, target.end_tokens, target.shape.vocab_size)
        planned_config(target, _plan(target, range(size) if size else None, args))
        return
    if given := [name for name in _SHAPE if getattr(args, name) is not None]:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"--init takes the shape of its head: leave out {options}")
    config = fitting_head(target, args.init, target.dtype).config
    if args.selector:
        replace(config, path_selector=SelectorConfig(args.rank))


def _head(
    target: FrozenTarget, texts: Texts, args: argparse.Namespace
) -> tuple[DraftHead, str | None]:
    """The head to train, and of one that is trained further the digest of its weights."""
    if args.init is None:
        chosen = None
        if args.draft_vocab:
            chosen = frequent_tokens(
                texts, args.draft_vocab, target.end_tokens, target.shape.vocab_size
            )
        return new_head(target, _plan(target, chosen, args), target.dtype), None
    head = known_head(target, args.init, target.dtype)
    start = weights_digest(head)  # without the new selector, which follows from the seed
    if args.selector:
        new_selector(head, target, SelectorConfig(args.rank), args.seed)
    return head, start


def _plan(
    target: FrozenTarget, draft_vocabulary: Sequence[int] | None, args: argparse.Namespace
) -> HeadPlan:
    method: Method = args.method or "p-eagle"
    return HeadPlan(
        method=method,
        layers=args.layers,
        taps=args.taps,
        intermediate_size=args.intermediate_size,
        own_embeddings={"own": True, "shared": False, None: None}[args.embeddings],
        draft_vocabulary=draft_vocabulary,
        mask_token=mask_token_of(target, args.mask_token) if method == "p-eagle" else None,
        seed=args.seed,
    )


def _token_budget(texts: Texts, args: argparse.Namespace) -> int | None:
    if args.minutes is not None:
        return None
    if args.tokens is not None:
        return int(args.tokens)
    epochs = args.epochs or (1.0 if args.selector else 3.0)
    return max(round(epochs * sum(text.drafted_tokens for text in texts)), 1)


def _describe(head: DraftHead, texts: Texts, args: argparse.Namespace) -> str:
    config = head.config
    size = sum(parameter.numel() for parameter in head.parameters())
    return (
        f"head: {config.method}, {config.num_hidden_layers} layers of {config.hidden_size}, "
        f"{size / 1e6:.1f} M parameters, taps {list(config.eagle_aux_hidden_state_layer_ids)}, "
        f"K = {args.k_train}; {len(texts)} texts, {int(texts.lengths.sum())} tokens"
    )


if __name__ == "__main__":
    sys.exit(main())
