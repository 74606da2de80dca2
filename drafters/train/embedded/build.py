"""Make the embedded models from nothing: tokenizer, target, its own text, head, cards.

Everything is built in a folder beside the destination and moved there at the end, so a
gateway that is using the old models never sees half of the new ones.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from drafters.train import evaluate, head, rollouts
from drafters.train.embedded import pretrain, tokenizer
from drafters.train.embedded.cards import write_cards


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m drafters.train.embedded.build", description=__doc__
    )
    parser.add_argument("--out", type=Path, default=evaluate.EMBEDDED)
    parser.add_argument("--target-minutes", type=float, default=42.0)
    parser.add_argument("--rollout-tokens", type=int, default=450_000)
    parser.add_argument("--head-minutes", type=float, default=13.0)
    parser.add_argument("--threads", type=int, default=1, help="one, where others compute too")
    args = parser.parse_args(argv)
    work = args.out.with_name(args.out.name + ".new")
    text, threads = work / "rollouts.safetensors", ["--threads", str(args.threads)]
    base, draft = work / "target", work / "p-eagle"
    tokenizer.main(["--out", str(base)])
    minutes = ["--minutes", str(args.target_minutes)]
    pretrain.main(["--tokenizer", str(base), "--out", str(base), *minutes, *threads])
    tokens = ["--tokens", str(args.rollout_tokens)]
    rollouts.main(["--target", str(base), "--out", str(text), *tokens, *threads])
    minutes = ["--minutes", str(args.head_minutes)]
    paths = ["--target", str(base), "--rollouts", str(text), "--out", str(draft)]
    head.main([*paths, *minutes, *threads])
    finish(work, args.threads)
    text.unlink()
    if args.out.exists():
        shutil.rmtree(args.out)
    work.rename(args.out)
    return 0


def finish(work: Path, threads: int) -> None:
    """Evaluate the pair in `work` and write its cards."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        paths = ["--target", str(work / "target"), "--head", str(work / "p-eagle")]
        evaluate.main([*paths, "--threads", str(threads)])
    print(printed.getvalue(), end="")
    table = [line for line in printed.getvalue().splitlines() if line.startswith("|")]
    write_cards(work, "\n".join(table))


if __name__ == "__main__":
    sys.exit(main())
