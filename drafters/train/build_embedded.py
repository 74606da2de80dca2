"""Build the embedded models from scratch: tokenizer, target, prompts, both heads, model cards.

Everything is built in a folder beside the destination and moved there at the end, so that a
gateway that is using the old models never sees half of the new ones. `aerie train` makes both
heads, on the same responses; the P-EAGLE head gets more time. Their matrices are then rounded to 8
bits, so that the cards say what the rounded heads do.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from drafters.model.round_weights import round_weights
from drafters.train import train_head
from drafters.train.embedded import EMBEDDED, pretrain, tokenizer
from drafters.train.embedded.cards import write_cards
from drafters.train.embedded.data import load_corpus
from drafters.train.embedded.prompts import MAX_CHAT_TOKENS, write_prompts
from drafters.train.evaluation import evaluate_head
from drafters.train.evaluation.workloads import STDLIB

RESPONSE_TOKENS = 160
# Two layers: each costs 8% of the target's twelve, and four would cost what they gain.
HEADS: dict[str, list[str]] = {
    "p-eagle": ["--method", "p-eagle", "--layers", "2", "--k-train", "11",
                "--mask-token", tokenizer.MASK],
    "eagle3": ["--method", "eagle3", "--layers", "1"],
}  # fmt: skip
# A masked position must infer from its anchor what EAGLE-3 reads in the draft before it: the later
# slots begin to learn only after some 300,000 anchors (bench/LOG.md).
TIMES = {"p-eagle": 8.0, "eagle3": 1.0}
TAPS = ("2", "6", "10")
EVALUATED = "200"  # prompts per workload: with 48, intervals are as wide as the differences


def main(argv: Sequence[str] | None = None) -> int:
    """Build the embedded models; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m drafters.train.build_embedded", description=__doc__
    )
    parser.add_argument("--out", type=Path, default=EMBEDDED)
    parser.add_argument("--target", type=Path, help="use this trained target, train no new one")
    parser.add_argument("--target-minutes", type=float, default=50.0)
    parser.add_argument("--prompts", type=int, default=6000, help="half code, half chat")
    parser.add_argument("--head-minutes", type=float, default=10.0, help="for EAGLE-3")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads [1]")
    args = parser.parse_args(argv)
    new = args.out.with_name(args.out.name + ".new")
    work = args.out.with_name(args.out.name + ".work")
    threads = ["--threads", str(args.threads)]
    base = new / "target"
    if args.target:
        shutil.copytree(args.target, base)
    else:
        tokenizer.main(["--out", str(base)])
        minutes = ["--minutes", str(args.target_minutes)]
        pretrain.main(["--tokenizer", str(base), "--out", str(base), *minutes, *threads])
    prompts, half = work / "prompts.jsonl", args.prompts // 2
    entries = tokenizer.load_tokenizer(base)
    write_prompts(prompts, load_corpus().train, entries, code=half, chat=half, seed=0)
    for name, options in HEADS.items():
        failed = train_head.main([
            "--target", str(base), "--out", str(new / name), "--prompts", str(prompts),
            "--work", str(work), "--taps", *TAPS, *options, *threads,
            "--max-length", str(MAX_CHAT_TOKENS + RESPONSE_TOKENS),
            "--response-tokens", str(RESPONSE_TOKENS),
            "--minutes", str(TIMES[name] * args.head_minutes),
        ])  # fmt: skip
        if failed:
            return failed
        round_weights(new / name)
    finish(new, args.threads)
    if args.out.exists():
        shutil.rmtree(args.out)
    new.rename(args.out)
    shutil.rmtree(work)
    return 0


def finish(folder: Path, threads: int) -> None:
    """Evaluate the heads in `folder` and write the cards of everything in it."""
    tables = {}
    for name in HEADS:
        printed = io.StringIO()
        with redirect_stdout(printed):
            paths = ["--target", str(folder / "target"), "--head", str(folder / name)]
            options = ["--workload", ",".join(STDLIB), "--count", EVALUATED]
            evaluate_head.main([*paths, *options, "--threads", str(threads)])
        print(printed.getvalue(), end="", flush=True)
        lines = printed.getvalue().splitlines()
        tables[name] = "\n".join(line for line in lines if line.startswith("|"))
    write_cards(folder, tables)


if __name__ == "__main__":
    sys.exit(main())
