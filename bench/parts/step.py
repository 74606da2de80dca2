"""`aerie bench step`: where the time of a step goes, in one process and served.

In one process, every part is timed without the other parts that it calls. Served, the engine
reports its steps by phase, the operating system the CPU time of each process, and the client how
long a step takes where its tokens arrive; the rest is the way between engine and client.

The model is the default one, or the one that AERIE_PRESET or AERIE_MODEL names.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil

from bench import options
from bench.errors import reports_errors
from bench.load.counters import Counters
from bench.load.run import counters, measure
from bench.options import tell
from bench.parser import command_parser
from bench.parts.offline import engine_core, held_out, lines, model_runner, start
from bench.sweep.cells import Work
from bench.sweep.fleet import Fleet
from bench.systems.method import parse
from bench.workloads.load import load_prompts
from drafters.markdown import columns
from drafters.train.number_options import positive_int

OUTPUT_TOKENS = 96
PHASES = ("target", "draft", "control", "other")
PROCESSES = {"EngineCore": "engine core", "Worker": "worker"}  # else the API's


class Parts:
    """Seconds of each part, without those of other parts that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []

    def time(self, owner: Any, names: str, part: str) -> None:
        """Time the functions `names` of a class, an instance or a module as `part` from now on."""
        for name in names.split():
            setattr(owner, name, self._timed(getattr(owner, name), part))

    def _timed(self, function: Any, part: str) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            began = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent = perf_counter() - began
                self.seconds[part] += spent - self._inner.pop()
                if self._inner:
                    self._inner[-1] += spent

        return timed


@reports_errors("aerie bench")
def main(argv: Sequence[str]) -> int:
    """Measure and print both tables; returns the exit code."""
    parser = command_parser("step", __doc__)
    parser.add_argument("--k", type=_ks, default=(0, 7), metavar="K,K", help="[0,7]")
    parser.add_argument("--concurrency", type=options.counts, default=(1, 8), metavar="C,C",
                        help="[1,8]")  # fmt: skip
    parser.add_argument(
        "--requests", type=positive_int, default=6, help="per user, when served [6]"
    )
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.offline:
        offline(args.k, args.concurrency)
        return 0
    cells = list(lines("bench.parts.step", argv, os.environ))
    print("In one process, ms of a step:\n" + "\n".join(columns(parts_table(cells))))
    rows = asyncio.run(served(args.k, args.concurrency, args.requests))
    print("\nServed, ms of a step:\n" + "\n".join(columns(rows)))
    return 0


def _ks(text: str) -> tuple[int, ...]:
    ks = tuple(int(part) for part in text.split(","))
    if min(ks) < 0:
        raise argparse.ArgumentTypeError(f"must not be negative: {text}")
    return ks


def parts_table(cells: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A column for each cell: milliseconds and share of each part, the largest first."""
    totals = [sum(cell["parts"].values()) for cell in cells]
    names = sorted({n for c in cells for n in c["parts"]}, key=lambda n: -_most(cells, n))
    rows = [["part", *(f"K={cell['k']}, c={cell['c']}" for cell in cells)]]
    for name in names:
        row = [name]
        for cell, total in zip(cells, totals, strict=True):
            spent = cell["parts"].get(name, 0.0)
            row.append(f"{1e3 * spent / cell['steps']:.2f} ({spent / total:.1%})")
        rows.append(row)
    whole = (f"{1e3 * t / c['steps']:.2f}" for c, t in zip(cells, totals, strict=True))
    return [*rows, ["all", *whole]]


def _most(cells: Sequence[dict[str, Any]], name: str) -> float:
    return max(float(cell["parts"].get(name, 0.0)) / cell["steps"] for cell in cells)


def timed_parts() -> list[tuple[Any, str, str]]:
    """(class or module, names of its functions, part of a step) of what is timed."""
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from drafters.control.controller import Controller
    from drafters.vllm.scheduling.scheduler import DraftingScheduler
    from drafters.vllm.v1 import drafter
    from drafters.vllm.v1.parallel import ParallelDrafter
    from drafters.vllm.v1.runner import V1DraftingRunner

    return [
        (LLMEngine, "step", "engine loop, process boundary"),
        (DraftingScheduler, "schedule update_from_output", "scheduler"),
        (Controller, "choose observe", "controller"),
        (GPUModelRunner, "execute_model sample_tokens", "model runner, other"),
        (GPUModelRunner, "_prepare_inputs _build_attention_metadata", "target's inputs"),
        (GPUModelRunner, "_model_forward", "target model"),
        (V1DraftingRunner, "_sample", "sampler"),
        (GPUModelRunner, "_bookkeeping_sync", "bookkeeping"),
        (drafter.Drafter, "draft sync_requests", "draft inputs"),
        (drafter.Drafter, "_tokens", "draft head"),
        (ParallelDrafter, "_walk", "draft head"),  # with a path selector
        (drafter, "gather", "draft hidden states"),
        (OutputProcessor, "process_outputs", "detokenisation, outputs"),
    ]


def offline(ks: Sequence[int], batches: Sequence[int]) -> None:
    """Time an engine in this process; prints a line of JSON for each K and batch."""
    from vllm import SamplingParams

    from app.settings import load

    given = {"k": max(1, *ks), "max_num_seqs": max(batches), "enable_prefix_caching": False}
    llm = start(load(given, os.environ))
    core, runner = engine_core(llm), model_runner(llm)
    parts = Parts()
    for owner, names, part in timed_parts():
        parts.time(owner, names, part)
    parts.time(runner.model, "compute_logits", "target head")
    parts.time(runner.drafter.model, "forward", "draft model")
    prompts = [{"prompt_token_ids": ids} for ids in held_out(2 * max(batches))]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    for k in ks:
        core.scheduler.speculation("steer", {"objective": "fixed", "k": k})
        for batch in batches:
            chosen: Any = prompts[:batch]
            llm.generate(chosen, params, use_tqdm=False)
            before = sum(core.scheduler.k_policy.snapshot()["totals"]["steps"])
            parts.seconds.clear()
            llm.generate(chosen, params, use_tqdm=False)
            steps = sum(core.scheduler.k_policy.snapshot()["totals"]["steps"]) - before
            cell = {"k": k, "c": batch, "steps": steps, "parts": dict(parts.seconds)}
            print("\n" + json.dumps(cell), flush=True)


async def served(ks: Sequence[int], users: Sequence[int], requests: int) -> list[list[str]]:
    """Start a gateway and measure it under load; a row for each K and number of users."""
    rows = [["K", "c", "target", "draft", "control", "other of the engine", "between steps",
             "client's step", "CPU: worker", "engine core", "API"]]  # fmt: skip
    names = [f"k:{k}" if k else "off" for k in ks]
    methods = parse(",".join(names))
    logs = Path("runs/step-logs")
    async with Fleet(methods, {"k": max(1, *ks)}, options.EAGLE3, logs, tell) as fleet:
        prompts = load_prompts("mixed", 1024)
        for method in methods:
            client = await fleet.switch(method)
            work = Work(prompts, fleet.model, OUTPUT_TOKENS, True)
            for c in users:
                await measure(client, work.jobs(0, c), limits=[c] * c)
                before, busy = await counters(client), _busy()
                count = c * requests
                found = await measure(client, work.jobs(c, count), limits=[c] * count)
                after = await counters(client)
                assert before is not None and after is not None
                number, each = by_phase(after.since(before))
                spent = {name: value - busy[name] for name, value in _busy().items()}
                whole = 1e3 * found["seconds"] / number
                cpus = (1e3 * spent[name] / number for name in ("worker", "engine core", "API"))
                columns_ = (*(each[phase] for phase in PHASES),
                            whole - sum(each.values()), whole, *cpus)  # fmt: skip
                rows.append([str(method.k), str(c), *(f"{value:.2f}" for value in columns_)])
    return rows


def by_phase(grown: Counters) -> tuple[float, dict[str, float]]:
    """The number of steps, and the milliseconds of a step by phase."""
    number = sum(grown.by("aerie_steps_total").values())
    seconds = grown.labelled("aerie_step_seconds_total")
    return number, {phase: 1e3 * value / number for phase, value in seconds.items()}


def _busy() -> dict[str, float]:
    """CPU seconds so far of the gateway's processes, which are this one's children."""
    found = {"API": 0.0, **dict.fromkeys(PROCESSES.values(), 0.0)}
    for process in psutil.Process().children(recursive=True):
        name = process.name()
        kind = next((kind for text, kind in PROCESSES.items() if text in name), "API")
        times = process.cpu_times()
        found[kind] += times.user + times.system
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
