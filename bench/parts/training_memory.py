"""`aerie bench training-memory`: peak memory and time of a training step by length and partitions.

    aerie bench training-memory [--lengths N ...] [--partitions S ...] [--method eagle3]

Every figure comes from a process of its own: the peak of resident memory, less that before the
step, and the step's CPU seconds. The head has layers of 384 and 8,192 tokens. A step that would
exceed --limit-gib is ended and reported as such.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from bench.errors import reports_errors
from bench.parser import command_parser
from drafters.model.config import HeadConfig
from drafters.model.head import DraftHead
from drafters.train.optimisation.cod import sample_chains
from drafters.train.optimisation.loss import DraftLoss
from drafters.train.optimisation.step import Batch, accumulate_gradients

VOCABULARY, HIDDEN, TAPS, MASK = 8192, 384, (2, 6, 10), 3
_GIB = 2**30


def step(method: str, layers: int, length: int, partitions: int) -> dict[str, float]:
    """Run a forward and a backward pass over `length` tokens, of which the first is the prompt."""
    torch.manual_seed(0)
    config = HeadConfig(
        VOCABULARY, HIDDEN, HIDDEN, 1024, layers, 6, 2, 64, TAPS, length,
        ptd_token_id=MASK if method == "p-eagle" else None, fc_norm=True,
    )  # fmt: skip
    head = DraftHead(config, own_embeddings=method == "p-eagle").to(torch.bfloat16)
    matrix = torch.randn(VOCABULARY, HIDDEN, dtype=torch.bfloat16)
    head.share(embeddings=matrix, lm_head=matrix)
    batch = Batch(
        torch.randint(VOCABULARY, (1, length)),
        torch.tensor([1]),
        torch.tensor([length]),
        torch.randn(1, length - 1, len(TAPS) * HIDDEN, dtype=torch.bfloat16),
        None,
    )
    chains = sample_chains(0, length - 3, torch.Generator().manual_seed(0))
    loss = DraftLoss(head, matrix, "labels")
    before, start = _resident(), time.process_time()
    accumulate_gradients(loss, batch, chains, partitions)
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"gib": (peak - before) / _GIB, "seconds": seconds}


def _resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def measured(args: argparse.Namespace, length: int, partitions: int) -> dict[str, float] | None:
    """Run `step` in a new process; None if it needs more than the limit. Raises RuntimeError if it
    fails otherwise."""
    command = [
        sys.executable, "-m", "bench.parts.training_memory", "--one", f"{length},{partitions}",
        "--method", args.method, "--layers", str(args.layers), "--limit-gib", str(args.limit_gib),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return figures
    if "allocate memory" in done.stderr or "MemoryError" in done.stderr:
        return None
    last = (done.stderr.strip() or "no error").splitlines()[-1]
    raise RuntimeError(f"the step of {length} tokens in {partitions} partitions failed: {last}")


@reports_errors("aerie bench")
def main(argv: Sequence[str]) -> int:
    """Measure the peak memory of each length and partition; returns the exit code."""
    parser = command_parser("training-memory", __doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2500, 5000, 10000, 20000])
    parser.add_argument("--partitions", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--method", choices=("p-eagle", "eagle3"), default="p-eagle")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--limit-gib", type=float, default=16.0)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        torch.set_num_threads(1)
        limit = round(args.limit_gib * _GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        length, partitions = map(int, args.one.split(","))
        print(json.dumps(step(args.method, args.layers, length, partitions)))
        return 0
    print(f"{args.method}, {args.layers} layers of {HIDDEN}, K = 8, r = 0.8: GiB (CPU seconds)")
    print("| tokens | " + " | ".join(f"S = {count}" for count in args.partitions) + " |")
    print("|" + " --- |" * (len(args.partitions) + 1))
    for length in args.lengths:
        cells = []
        for count in args.partitions:
            found = measured(args, length, count)
            cells.append(
                f"over {args.limit_gib:g}" if found is None
                else f"{found['gib']:.2f} ({found['seconds']:.0f})"
            )  # fmt: skip
        print(f"| {length:,} | " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
