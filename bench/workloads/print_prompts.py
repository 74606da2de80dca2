"""`aerie bench prompts`: print a workload as JSON lines, for other load generators."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from bench.errors import reports_errors
from bench.workloads.embedded import SEED
from bench.workloads.load import load_prompts


@reports_errors("aerie bench")
def main(argv: Sequence[str]) -> int:
    """Print a line for each prompt: `{"prompt": ...}` or `{"messages": [...]}`.

    It has `extra_body` too if the answer is constrained."""
    parser = argparse.ArgumentParser(
        prog="aerie bench prompts", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--workload", default="completion", help="as in `aerie bench run`")
    parser.add_argument("--chat", action="store_true", help="as in `aerie bench run`")
    parser.add_argument("--count", type=int, default=64, help="number of prompts [64]")
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args(argv)
    for prompt in load_prompts(args.workload, args.count, chat=args.chat, seed=args.seed):
        print(json.dumps(prompt.row()))
    return 0
