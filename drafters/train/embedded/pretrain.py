"""Pretrain a small target on Python's standard library; by default the embedded one.

The embedded target is a deep, narrow Llama, twelve layers of 192: its step must cost clearly more
than a pass of a two-layer head, or speculation would not pay at any acceptance.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from drafters.train.embedded.data import Corpus, load_corpus
from drafters.train.embedded.prompts import some_files
from drafters.train.embedded.stream import rows, tokenise
from drafters.train.embedded.tokenizer import END_OF_TEXT, IM_END, MAX_LENGTH, load_tokenizer
from drafters.train.optimisation.loss import cross_entropy_backward
from drafters.train.optimisation.optimizer import MixedOptimizer, trapezoid
from drafters.train.progress import Progress
from drafters.train.provenance import read_provenance, write_provenance
from drafters.train.runtime import prepare_cpu, slow_bfloat16

# Row length in each part of the run, and where the parts end, as shares of the run. AMX does not
# speed up attention's backward pass, so most of the run has short rows.
LENGTHS, ENDS = (256, 512, 1024), (0.50, 0.85, 1.0)
# Plain matrix products, compiled, beat torch's fused CPU attention, whose backward pass does not
# use AMX (2,197 against 1,971 tokens/s at 256, one core).
ATTENTION = "eager"
# Compilation costs some 40 s for each row length and makes steps a third faster (six layers of
# 256: 4,724 against 3,516 tokens/s, one core), which short runs do not gain back.
COMPILED_FROM = 5.0  # minutes
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class Shape:
    """A target's architecture; the defaults are the embedded target's, 6.3 M parameters."""

    family: str = "llama"  # transformers' model_type
    layers: int = 12
    hidden: int = 192  # a multiple of 64, the head size


def target_config(shape: Shape, vocab_size: int, end_of_text: int, im_end: int) -> Any:
    """The transformers configuration of a target of this shape."""
    heads = shape.hidden // 64
    return AutoConfig.for_model(
        shape.family,
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 8 // 3,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 3 if heads % 3 == 0 else heads,
        head_dim=64,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[im_end, end_of_text],
        pad_token_id=end_of_text,
        attention_bias=False,
        attn_implementation=ATTENTION,
    )


def new_target(shape: Shape, folder: Path, seed: int) -> Any:
    """A freshly initialised bf16 target for the tokenizer in `folder`."""
    tokenizer = load_tokenizer(folder)
    end, im_end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(IM_END)
    torch.manual_seed(seed)
    config = target_config(shape, tokenizer.get_vocab_size(), end, im_end)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        eos_token_id=[im_end, end], pad_token_id=end, do_sample=False
    )
    return model


def load_target(folder: Path) -> Any:
    """Load a trained target in bf16, to train it further."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation=ATTENTION
    )


def save_target(model: Any, folder: Path, tokenizer_folder: Path) -> None:
    """Write the target's checkpoint with the tokenizer's files beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if folder.resolve() != tokenizer_folder.resolve():
            shutil.copy(tokenizer_folder / name, folder / name)


def length_at(fraction: float, lengths: Sequence[int]) -> int:
    """The row length at a share of the run; with fewer lengths the last one is used to the end."""
    ends = (*ENDS[: len(lengths) - 1], 1.0)
    return next(length for end, length in zip(ends, lengths, strict=True) if fraction <= end)


@torch.no_grad()
def evaluate_loss(model: Any, batch: torch.Tensor) -> float:
    """Mean cross-entropy in nats per token over rows `[rows, length + 1]`."""
    total = 0.0
    for row in batch.split(8):
        logits = model(row[:, :-1], use_cache=False).logits.float()
        total += functional.cross_entropy(
            logits.flatten(0, 1), row[:, 1:].flatten(), reduction="sum"
        ).item()
    return total / batch[:, 1:].numel()


def held_out_rows(corpus: Corpus, folder: Path, count: int, length: int) -> torch.Tensor:
    """Rows of held-out files and conversations, the same in each call: `[count, length + 1]`."""
    documents = tokenise(corpus.held_out, load_tokenizer(folder), seed=0)
    return torch.stack(list(islice(rows(documents, length, 0.35, seed=1), count)))


def train_target(
    model: Any,
    streams: dict[int, Iterator[torch.Tensor]],
    progress: Progress,
    *,
    batch_tokens: int,
    muon_lr: float,
    adam_lr: float,
    compiled: bool = True,
) -> float:
    """Train until the budget is spent. Returns the smoothed loss, in nats per token.

    `streams` has the rows of each length, in the order in which the lengths are used.
    """
    optimizer = MixedOptimizer(model, muon_lr=muon_lr, adam_lr=adam_lr, weight_decay=0.01)
    smoothed = 0.0
    model.train()
    body = torch.compile(model.model, dynamic=False) if compiled else model.model
    while progress.fraction < 1.0:
        fraction = progress.fraction
        length = length_at(fraction, list(streams))
        batch = torch.stack(list(islice(streams[length], batch_tokens // length)))
        hidden = body(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
        loss = cross_entropy_backward(
            hidden.flatten(0, 1), model.lm_head.weight, batch[:, 1:].flatten()
        ).item()
        norm = optimizer.step(trapezoid(fraction))
        weight = max(0.02, 1.0 / (progress.steps + 1))
        smoothed += weight * (loss - smoothed)
        progress.advance(batch[:, 1:].numel(), loss=smoothed, norm=norm, length=length)
    model.eval()
    return smoothed


def main(argv: Sequence[str] | None = None) -> int:
    """Pretrain a target; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m drafters.train.embedded.pretrain", description=__doc__
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of its files")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the target to")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--minutes", type=float)
    budget.add_argument("--tokens", type=int)
    shape = Shape()
    parser.add_argument("--family", default=shape.family, help="llama, qwen3, ...")
    parser.add_argument("--layers", type=int, default=shape.layers)
    parser.add_argument("--hidden", type=int, default=shape.hidden, help="a multiple of 64")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=list(LENGTHS), help="tokens of rows, one to three"
    )
    parser.add_argument("--init", type=Path, help="folder of a trained target to train further")
    parser.add_argument("--files", type=int, metavar="N", help="train on N of the files [all]")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction,
        help=f"compile the training step [from {COMPILED_FROM:g} minutes on]",
    )  # fmt: skip
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--chat-share", type=float, default=0.35)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args(argv)
    prepare_cpu(args.threads)
    corpus = load_corpus()
    files = some_files(corpus.train, args.files, args.seed)
    documents = tokenise(files, load_tokenizer(args.tokenizer), args.seed)
    streams = {
        length: rows(documents, length, args.chat_share, args.seed + length)
        for length in args.lengths
    }
    shape = Shape(args.family, args.layers, args.hidden)
    model = load_target(args.init) if args.init else new_target(shape, args.tokenizer, args.seed)
    model = model.to(slow_bfloat16("cpu") or torch.bfloat16)
    compiled = args.compile
    if compiled is None:
        compiled = args.minutes is None or args.minutes >= COMPILED_FROM
    progress = Progress(minutes=args.minutes, tokens=args.tokens)
    loss = train_target(
        model,
        streams,
        progress,
        batch_tokens=args.batch_tokens,
        muon_lr=args.muon_lr,
        adam_lr=args.adam_lr,
        compiled=compiled,
    )
    model = model.to(torch.bfloat16)
    save_target(model, args.out, args.tokenizer)
    held_out = evaluate_loss(model, held_out_rows(corpus, args.tokenizer, 64, 512))
    write_provenance(
        args.out,
        ["drafters.train.embedded.pretrain", *argv],
        args.seed,
        {
            "data_sha256": corpus.sha256,
            "files": len(files),
            "tokens": progress.tokens,
            "init": read_provenance(args.init),
            "steps": progress.steps,
            "minutes": round(progress.seconds / 60, 1),
            "train_loss": round(loss, 4),
            "held_out_loss": round(held_out, 4),
        },
    )
    print(f"train loss {loss:.4f}, held-out loss {held_out:.4f} nats/token")
    return 0


if __name__ == "__main__":
    sys.exit(main())
