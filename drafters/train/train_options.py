"""The options of `aerie train`, with their defaults."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from drafters.train.data.mix import FILE as MIX_FILE
from drafters.train.data.responses import KEY_VARIABLE, server_url
from drafters.train.head_option import head_folder
from drafters.train.number_options import (
    non_negative_float,
    non_negative_int,
    positive_float,
    positive_int,
    positive_share,
    share,
)
from drafters.train.optimisation.cod import K_TRAIN, RETAIN
from drafters.train.optimisation.loop import LoopOptions
from drafters.train.template_option import add_template_option

INIT_MUON_LR, INIT_ADAM_LR = 3e-3, 3e-4  # of a head that is trained further


def train_parser(description: str | None) -> argparse.ArgumentParser:
    """The parser of `aerie train`, whose help begins with `description`."""
    parser = argparse.ArgumentParser(
        prog="aerie train",
        description=description,
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
        "that is faster; float16 is trained in bfloat16]",
    )
    parser.add_argument("--threads", type=positive_int, help="CPU threads [all]")

    data = parser.add_argument_group("data")
    data.add_argument(
        "--prompts", type=Path, nargs="+", required=True, metavar="FILE",
        help='JSON lines, each {"messages": [...]} or {"prompt": "..."}',
    )  # fmt: skip
    data.add_argument(
        "--malformed", choices=("fail", "skip"), default="fail",
        help="what to do with lines that do not parse",
    )  # fmt: skip
    add_template_option(data)
    data.add_argument(
        "--max-length", type=positive_int, default=2048, help="prompt + response, tokens"
    )
    data.add_argument(
        "--response-tokens", type=positive_int, default=256, help="longest response, tokens"
    )
    data.add_argument(
        "--sampled-share", type=share, default=0.3,
        help="share of the responses that are sampled; the rest are greedy",
    )  # fmt: skip
    data.add_argument(
        "--temperature", type=non_negative_float, default=0.7, help="of sampled responses"
    )
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
        "--cache-gib",
        type=non_negative_float,
        default=8.0,
        help="limit of hidden states on disk, GiB",
    )
    data.add_argument(
        "--no-mix", action="store_true",
        help=f"do not write {MIX_FILE}, some of the texts, beside the head: for a head that is "
        "given to others, trained on texts that are not",
    )  # fmt: skip
    data.add_argument("--restart", action="store_true", help="do not continue a saved run")

    shape = parser.add_argument_group("head")
    shape.add_argument(
        "--init", type=head_folder, metavar="HEAD",
        help="folder or hub id of a trained head to train further",
    )  # fmt: skip
    shape.add_argument("--method", choices=("p-eagle", "eagle3"), help="[p-eagle]")
    shape.add_argument("--layers", type=positive_int, help="[4 for P-EAGLE, 1 for EAGLE-3]")
    shape.add_argument("--taps", type=int, nargs="+", help="[an early, a middle, a late layer]")
    shape.add_argument("--intermediate-size", type=positive_int, help="[the target's]")
    shape.add_argument(
        "--embeddings", choices=("own", "shared"),
        help="the head's own, or the target's [own for P-EAGLE, shared for EAGLE-3]",
    )  # fmt: skip
    shape.add_argument(
        "--draft-vocab", type=positive_int, metavar="N", help="draft only the N commonest tokens"
    )
    shape.add_argument(
        "--layout", choices=("flat", "speculators"), default="flat",
        help="layout of the checkpoint: that of EAGLE-3 releases, or the speculators library's",
    )  # fmt: skip
    shape.add_argument("--mask-token", metavar="TOKEN", help="P-EAGLE's mask token, or its id")

    selector = parser.add_argument_group("path selector")
    selector.add_argument(
        "--selector", action="store_true",
        help="train a path selector for the P-EAGLE head of --init, and nothing else: OUT is a "
        "copy of that head, with the selector",
    )  # fmt: skip
    selector.add_argument(
        "--rank",
        type=int,
        default=256,
        metavar="R",
        help="size of the products that score two tokens",
    )
    selector.add_argument(
        "--dropout", type=share, default=loop.dropout, metavar="P",
        help="share of a product that each update leaves out",
    )  # fmt: skip

    training = parser.add_argument_group("training")
    budget = training.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=positive_float, help="budget: minutes of training")
    budget.add_argument("--tokens", type=positive_int, help="budget: drafts of depth 0")
    budget.add_argument(
        "--epochs",
        type=positive_float,
        help="budget: passes over the data [3; of a path selector 1]",
    )
    training.add_argument(
        "--k-train", type=positive_int, default=K_TRAIN, metavar="K",
        help="drafts per anchor, at depths 0 to K - 1",
    )  # fmt: skip
    training.add_argument(
        "--retain", type=positive_share, default=RETAIN, metavar="R",
        help="COD: depth d keeps a share R^d of the anchors; 1 keeps all",
    )  # fmt: skip
    training.add_argument(
        "--loss", choices=("labels", "distribution"),
        help="compare drafts with the tokens of the text, or with the target's probabilities "
        "[labels; for a path selector distribution]",
    )  # fmt: skip
    training.add_argument(
        "--batch-tokens",
        type=positive_int,
        default=loop.batch_tokens,
        help="padded tokens of an update",
    )
    training.add_argument(
        "--partitions", type=non_negative_int, default=loop.partitions,
        help="split the drafts of a sequence to save memory; 0: as few as keep the mask small",
    )  # fmt: skip
    training.add_argument(
        "--muon-lr", type=non_negative_float,
        help=f"learning rate of matrices [{loop.muon_lr}; with --init {INIT_MUON_LR}]",
    )  # fmt: skip
    training.add_argument(
        "--adam-lr", type=non_negative_float,
        help=f"learning rate of all other weights [{loop.adam_lr}; with --init {INIT_ADAM_LR}, "
        f"of a path selector {loop.adam_lr}]",
    )  # fmt: skip
    return parser


def learning_rates(args: argparse.Namespace) -> tuple[float, float]:
    """The learning rates of matrices and of all other weights: given ones, else those of a new head
    or path selector, or the lower ones of a head that is trained further."""
    loop = LoopOptions()
    muon, adam = loop.muon_lr, loop.adam_lr
    if args.init is not None and not args.selector:
        muon, adam = INIT_MUON_LR, INIT_ADAM_LR
    return (
        muon if args.muon_lr is None else args.muon_lr,
        adam if args.adam_lr is None else args.adam_lr,
    )
