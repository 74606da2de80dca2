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
from pathlib import Path

import torch

from drafters.model.checkpoint import save_head
from drafters.model.config import Method
from drafters.model.head import DraftHead
from drafters.model.speculators import save_speculators
from drafters.train.data.examples import MalformedLine, encode, read_examples
from drafters.train.data.hidden_states import StateStore
from drafters.train.data.responses import (
    KEY_VARIABLE,
    ResponseServerError,
    respond,
    respond_by_server,
    server_url,
)
from drafters.train.data.token_sequences import Text, Texts
from drafters.train.optimisation.cod import K_TRAIN, RETAIN
from drafters.train.optimisation.head_init import (
    HeadPlan,
    frequent_tokens,
    known_head,
    mask_token_of,
    new_head,
)
from drafters.train.optimisation.loop import LoopOptions, ResumeError, Trainer
from drafters.train.progress import Progress
from drafters.train.provenance import read_provenance, write_provenance
from drafters.train.runtime import prepare_cpu, slow_bfloat16
from drafters.train.target import FrozenTarget

# Options that shape a new head; each is None unless it is given.
_SHAPE = (
    "method", "layers", "taps", "intermediate_size", "embeddings", "draft_vocab", "mask_token",
)  # fmt: skip
_GIB = 2**30
_PART = 512  # prompts whose responses are written to disk together


def main(argv: Sequence[str] | None = None) -> int:
    """Run `aerie train`; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(argv)
    try:
        _run(args, argv)
    except (MalformedLine, ResumeError, ResponseServerError, ValueError, OSError) as error:
        print(f"aerie train: {error}", file=sys.stderr)
        return 1
    return 0


def _run(args: argparse.Namespace, argv: list[str]) -> None:
    prepare_cpu(args.threads)
    work = args.work or args.out.with_name(args.out.name + ".work")
    work.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, args.dtype) if args.dtype else slow_bfloat16(args.device)
    print(f"target: loading {args.target}", flush=True)
    target = FrozenTarget.load(args.target, dtype=dtype, device=args.device)
    if args.loss == "distribution" and target.softcap is not None:
        raise ValueError("--loss distribution: this family caps its logits; use --loss labels")
    texts = _responses(target, _prompts(target, args), work, args)
    head = _head(target, texts, args, dtype or target.dtype)
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
    options = LoopOptions(
        batch_tokens=args.batch_tokens,
        muon_lr=args.muon_lr,
        adam_lr=args.adam_lr,
        k_train=args.k_train,
        retain=args.retain,
        loss=args.loss,
        partitions=args.partitions,
        seed=args.seed,
    )
    trainer = Trainer(head, target, texts, states, progress, options)
    saved = work / f"resume-{args.out.name}.pt"
    if saved.exists() and not args.restart:
        trainer.load(saved)
        print(f"resumed at step {progress.steps}, {100 * progress.fraction:.1f}% of the budget")
    print(_describe(head, texts, args), flush=True)
    trainer.run(saved)
    if not args.dtype:
        head = head.to(target.stored)
    if args.layout == "speculators":
        save_speculators(head, args.out, target=args.target, draft_tokens=args.k_train)
    else:
        save_head(head, args.out)
    write_provenance(args.out, ["aerie train", *argv], args.seed, {
        "method": head.config.method,
        "target_sha256": target.fingerprint,
        "data_sha256": texts.sha256,
        "k_train": args.k_train,
        "retain": args.retain,
        "loss": args.loss,
        "rows": len(texts),
        "tokens": progress.tokens,
        "steps": progress.steps,
        "minutes": round(progress.seconds / 60, 1),
        "init": read_provenance(args.init),
        "loss_per_depth": [round(loss, 4) for loss in trainer.smoothed.tolist()],
    })  # fmt: skip
    saved.unlink(missing_ok=True)
    print("loss per depth: " + " ".join(f"{loss:.3f}" for loss in trainer.smoothed.tolist()))
    print(f"wrote {args.out}; next: aerie evaluate --target {args.target} --head {args.out}")


def _prompts(target: FrozenTarget, args: argparse.Namespace) -> list[list[int]]:
    """Token ids of all prompts that leave room for a response."""
    room = args.max_length - args.response_tokens
    examples = read_examples(args.prompts, malformed=args.malformed)
    encoded = [encode(example, target.tokenizer, max_tokens=room) for example in examples]
    prompts = [ids for ids in encoded if ids]
    if skipped := len(encoded) - len(prompts):
        print(f"prompts: {skipped} of {len(encoded)} are longer than {room} tokens: left out")
    if not prompts:
        raise ValueError("no prompt is left; see --max-length and --response-tokens")
    return prompts


def _responses(
    target: FrozenTarget, prompts: list[list[int]], work: Path, args: argparse.Namespace
) -> Texts:
    """The target's answers to all prompts, reusing those that an earlier run has written."""
    asked = (args.response_tokens, args.sampled_share, args.temperature, args.seed)
    digest = hashlib.sha256(f"{target.fingerprint} {asked} {prompts}".encode())
    folder = work / f"responses-{digest.hexdigest()[:16]}"
    parts = list(_parts(prompts, args.sampled_share, args.temperature, args.seed))
    files = [folder / f"{number}.safetensors" for number in range(len(parts))]
    missing = [number for number, file in enumerate(files) if not file.exists()]
    print(f"responses: {len(prompts)} prompts, up to {args.response_tokens} tokens each; "
          f"{len(parts) - len(missing)} of {len(parts)} parts exist already")  # fmt: skip
    total = sum(len(parts[number][0]) for number in missing) * args.response_tokens
    progress = Progress(tokens=max(total, 1))
    for number in missing:
        answers = _answers(target, *parts[number], args, progress)
        # A response of one token has nothing to draft: the target writes the first token itself.
        Texts.of(item for item in answers if len(item.tokens) > item.prompt + 1).save(files[number])
    texts = Texts.of(text for file in files for text in Texts.load(file))
    if not len(texts):
        raise ValueError("the target answers nothing: every response ends with its first token")
    return texts


def _parts(
    prompts: list[list[int]], share: float, temperature: float, seed: int
) -> Iterator[tuple[list[list[int]], float, int]]:
    """Split prompts into parts of random order, whose responses are written to disk together.

    (1 - share) of the prompts are answered greedily. Yields (prompts, temperature, seed).
    """
    order = random.Random(seed).sample(prompts, len(prompts))
    cut = round(len(order) * (1.0 - share))
    for kind, part in ((0.0, order[:cut]), (temperature, order[cut:])):
        for start in range(0, len(part), _PART):
            yield part[start : start + _PART], kind, seed + start


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


def _head(
    target: FrozenTarget, texts: Texts, args: argparse.Namespace, dtype: torch.dtype
) -> DraftHead:
    if args.init is None:
        return new_head(target, _plan(target, texts, args), dtype)
    if given := [name for name in _SHAPE if getattr(args, name) is not None]:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"--init takes the shape of its head: leave out {options}")
    return known_head(target, args.init, dtype)


def _plan(target: FrozenTarget, texts: Texts, args: argparse.Namespace) -> HeadPlan:
    chosen = None
    method: Method = args.method or "p-eagle"
    if args.draft_vocab:
        chosen = frequent_tokens(
            texts, args.draft_vocab, target.end_tokens, target.shape.vocab_size
        )
    return HeadPlan(
        method=method,
        layers=args.layers,
        taps=args.taps,
        intermediate_size=args.intermediate_size,
        own_embeddings={"own": True, "shared": False, None: None}[args.embeddings],
        draft_vocabulary=chosen,
        mask_token=mask_token_of(target, args.mask_token) if method == "p-eagle" else None,
        seed=args.seed,
    )


def _token_budget(texts: Texts, args: argparse.Namespace) -> int | None:
    if args.minutes is not None:
        return None
    if args.tokens is not None:
        return int(args.tokens)
    # An update counts drafts of depth 0, which a response's first token is not.
    drafted = sum(max(len(text.tokens) - text.prompt - 1, 0) for text in texts)
    return max(round(args.epochs * drafted), 1)


def _describe(head: DraftHead, texts: Texts, args: argparse.Namespace) -> str:
    config = head.config
    size = sum(parameter.numel() for parameter in head.parameters())
    return (
        f"head: {config.method}, {config.num_hidden_layers} layers of {config.hidden_size}, "
        f"{size / 1e6:.1f} M parameters, taps {list(config.eagle_aux_hidden_state_layer_ids)}, "
        f"K = {args.k_train}; {len(texts)} texts, {int(texts.lengths.sum())} tokens"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="aerie train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    loop = LoopOptions()
    parser.add_argument("--target", required=True, help="folder or hub id of a causal LM")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the head to")
    parser.add_argument("--seed", type=int, default=loop.seed)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="type to train in and to save [the checkpoint's; on a CPU, trained in float32 where "
        "that is faster]",
    )
    parser.add_argument("--threads", type=int, help="CPU threads [all]")

    data = parser.add_argument_group("data")
    data.add_argument(
        "--prompts", type=Path, nargs="+", required=True, metavar="FILE",
        help='JSON lines, each {"messages": [...]} or {"prompt": "..."}',
    )  # fmt: skip
    data.add_argument(
        "--malformed", choices=("fail", "skip"), default="fail",
        help="what to do with lines that do not parse",
    )  # fmt: skip
    data.add_argument("--max-length", type=int, default=2048, help="prompt + response, tokens")
    data.add_argument("--response-tokens", type=int, default=256, help="longest response, tokens")
    data.add_argument(
        "--sampled-share", type=float, default=0.3,
        help="share of the responses that are sampled; the rest are greedy",
    )  # fmt: skip
    data.add_argument("--temperature", type=float, default=0.7, help="of sampled responses")
    data.add_argument(
        "--server", metavar="URL", type=server_url,
        help="let an OpenAI-compatible vLLM server of the same target write the responses; "
        f"its API key is read from {KEY_VARIABLE}",
    )  # fmt: skip
    data.add_argument(
        "--work", type=Path, metavar="FOLDER",
        help="responses, hidden states and the saved run, reused by later runs [OUT.work]",
    )  # fmt: skip
    data.add_argument(
        "--cache-gib", type=float, default=8.0, help="limit of hidden states on disk, GiB"
    )
    data.add_argument("--restart", action="store_true", help="do not continue a saved run")

    shape = parser.add_argument_group("head")
    shape.add_argument(
        "--init", type=Path, metavar="HEAD", help="folder of a trained head to train further"
    )
    shape.add_argument("--method", choices=("p-eagle", "eagle3"), help="[p-eagle]")
    shape.add_argument("--layers", type=int, help="[4 for P-EAGLE, 1 for EAGLE-3]")
    shape.add_argument("--taps", type=int, nargs="+", help="[an early, a middle, a late layer]")
    shape.add_argument("--intermediate-size", type=int, help="[the target's]")
    shape.add_argument(
        "--embeddings", choices=("own", "shared"),
        help="the head's own, or the target's [own for P-EAGLE, shared for EAGLE-3]",
    )  # fmt: skip
    shape.add_argument(
        "--draft-vocab", type=int, metavar="N", help="draft only the N commonest tokens"
    )
    shape.add_argument(
        "--layout", choices=("flat", "speculators"), default="flat",
        help="layout of the checkpoint: that of EAGLE-3 releases, or the speculators library's",
    )  # fmt: skip
    shape.add_argument("--mask-token", metavar="TOKEN", help="P-EAGLE's mask token, or its id")

    training = parser.add_argument_group("training")
    budget = training.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, help="budget: minutes of training")
    budget.add_argument("--tokens", type=int, help="budget: drafts of depth 0")
    budget.add_argument("--epochs", type=float, default=3.0, help="budget: passes over the data")
    training.add_argument(
        "--k-train", type=int, default=K_TRAIN, metavar="K",
        help="drafts per anchor, at depths 0 to K - 1",
    )  # fmt: skip
    training.add_argument(
        "--retain", type=float, default=RETAIN, metavar="R",
        help="COD: depth d keeps a share R^d of the anchors; 1 keeps all",
    )  # fmt: skip
    training.add_argument(
        "--loss", choices=("labels", "distribution"), default=loop.loss,
        help="compare drafts with the tokens of the text, or with the target's probabilities",
    )  # fmt: skip
    training.add_argument(
        "--batch-tokens", type=int, default=loop.batch_tokens, help="padded tokens of an update"
    )
    training.add_argument(
        "--partitions", type=int, default=loop.partitions,
        help="split the drafts of a sequence to save memory; 0: as few as keep the mask small",
    )  # fmt: skip
    training.add_argument(
        "--muon-lr", type=float, default=loop.muon_lr, help="learning rate of matrices"
    )
    training.add_argument(
        "--adam-lr", type=float, default=loop.adam_lr, help="learning rate of all other weights"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
