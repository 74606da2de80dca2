"""`aerie bench interop`: one server measured by `vllm bench serve` and by our client, in turns.

    aerie bench interop --url http://127.0.0.1:8000 --tokenizer models/embedded/target

Both clients send the same prompts, greedy, with equally long answers, at the same concurrency. The
table has the ratios of their figures, pair by pair. vLLM's client needs pandas and datasets.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.errors import reports_errors
from bench.load.client import KEY_VARIABLE, Client, server_address
from bench.load.intervals import ratio
from bench.load.run import measure
from bench.options import tell
from bench.parser import command_parser
from bench.provenance import provenance
from bench.sweep.cells import Work
from bench.sweep.table import pm
from bench.workloads.load import load_prompts
from bench.workloads.prompt import Prompt
from drafters.markdown import columns
from drafters.train.number_options import positive_int

WORKLOAD = "completion"  # vLLM's `custom` data set has prompts to continue
TIMEOUT_S = 600
# The `vllm` command of the CPU wheel fails as it finds no version of itself; its code works.
_VLLM = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)

Run = Callable[[], dict[str, float]]


@reports_errors("aerie bench")
def main(argv: Sequence[str]) -> int:
    """Measure in pairs, print the table; returns the exit code."""
    args = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        chosen = load_prompts(WORKLOAD, args.requests)
        prompts.write_text("".join(json.dumps({"prompt": p.text}) + "\n" for p in chosen), "utf-8")
        args.model = args.model or asyncio.run(_first_model(args.url))
        pairs = compare(
            lambda: asyncio.run(_ours(args, chosen)),
            lambda: _theirs(args, prompts, Path(folder)),
            args.pairs,
        )
    tell("\n".join(columns(table(pairs))))
    told = provenance(["interop", *argv])
    print(json.dumps({"pairs": pairs, "provenance": told}, allow_nan=False))
    return 0


def compare(ours: Run, theirs: Run, pairs: int) -> list[dict[str, dict[str, float]]]:
    """Run both clients `pairs` times; which of them is first alternates."""
    found = []
    for number in range(pairs):
        order = [("ours", ours), ("vllm", theirs)]
        found.append({name: run() for name, run in (order if number % 2 == 0 else order[::-1])})
        tell(f"pair {number}: {found[-1]}")
    return found


def table(pairs: Sequence[dict[str, dict[str, float]]]) -> list[list[str]]:
    """A row for each figure: the means of both clients, and ours over theirs."""
    rows = [["", "ours", "vllm bench serve", "ours / theirs, in pairs"]]
    for name in pairs[0]["ours"]:
        ours, theirs = ({n: p[who][name] for n, p in enumerate(pairs)} for who in ("ours", "vllm"))
        means = [sum(side.values()) / len(side) for side in (ours, theirs)]
        rows.append([name, *(f"{mean:.2f}" for mean in means), pm(*ratio(ours, theirs), ".3f")])
    return rows


async def _first_model(url: str) -> str:
    async with Client.of_running_server(url) as client:
        return await client.first_model()


async def _ours(args: argparse.Namespace, prompts: Sequence[Prompt]) -> dict[str, float]:
    async with Client.of_running_server(args.url) as client:
        work = Work(prompts, args.model, args.max_tokens, ignore_eos=True)
        users = args.concurrency
        # As vLLM's client warms up: the first prompt, once for each user.
        warm_up = work.jobs(0, 1) * users
        await measure(client, warm_up, limits=[users] * users)
        jobs = work.jobs(0, args.requests)
        found = await measure(client, jobs, limits=[users] * len(jobs))
    if found["failed"]:
        raise RuntimeError(f"{found['failed']} of our requests failed: {found['failures'][0]}")
    return {
        "tokens/s": found["tokens_per_second"],
        "TTFT median, ms": found["ttft_ms"]["p50"],
        "TPOT median, ms": found["tpot_ms"]["p50"],
        "ITL mean, ms": found["event_gap_ms"]["mean"],  # theirs counts events without text too
    }


def _theirs(args: argparse.Namespace, prompts: Path, folder: Path) -> dict[str, float]:
    out = folder / "vllm.json"
    out.unlink(missing_ok=True)
    command = [
        sys.executable, "-c", _VLLM, "--backend", "openai",
        "--base-url", server_address(args.url), "--endpoint", "/v1/completions",
        "--model", args.model, "--tokenizer", args.tokenizer,
        "--dataset-name", "custom", "--dataset-path", str(prompts), "--skip-chat-template",
        "--disable-shuffle", "--custom-output-len", str(args.max_tokens), "--ignore-eos",
        "--temperature", "0", "--num-prompts", str(args.requests), "--max-concurrency",
        str(args.concurrency), "--num-warmups", str(args.concurrency), "--disable-tqdm",
        "--save-result", "--result-filename", str(out),
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_PLUGINS": "none", "VLLM_NO_USAGE_STATS": "1"}
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if not out.exists():
        raise RuntimeError(f"vllm bench serve: {(ended.stderr or ended.stdout)[-600:]}")
    found: dict[str, Any] = json.loads(out.read_text("utf-8"))
    if found["completed"] != args.requests:
        raise RuntimeError(f"vllm bench serve completed {found['completed']} of {args.requests}")
    return {
        "tokens/s": found["output_throughput"],
        "TTFT median, ms": found["median_ttft_ms"],
        "TPOT median, ms": found["median_tpot_ms"],
        "ITL mean, ms": found["mean_itl_ms"],
    }


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("interop", __doc__, f"An API key is read from {KEY_VARIABLE}.")
    add = parser.add_argument
    add("--url", required=True, help="address of the server")
    add("--model", help="[the server's first]")
    add("--tokenizer", required=True, help="the model's, with which vLLM's client counts prompts")
    add("--concurrency", type=positive_int, default=8, help="[8]")
    add("--requests", type=positive_int, default=64, help="of each run [64]")
    add("--max-tokens", type=positive_int, default=64, help="of an answer [64]")
    add("--pairs", type=positive_int, default=5, help="runs of each client [5]")
    return parser
