"""`aerie bench device`: how long a step, and the drafter's pass in it, take on the device.

Engines run one after the other, each in a process of its own and without a server. Methods are
those of a sweep: `off` (K = 0), `k:K` and `plain` on our engine, `none`, `vllm:K` and `eagle3:K` on
vLLM's. While a batch of requests decodes, events on the device's stream mark the beginning of each
step, and the beginning and end of each pass of the drafter; on a CPU the clock does. Figures are
medians over steps that read no prompt and in which every request verifies K drafts. A step lasts
from its beginning to that of the next one, so that it includes the time for which the device waits
for the host. How each engine started (runner, drafter, graphs, memory) is in a table too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from bench import options
from bench.errors import reports_errors
from bench.options import tell
from bench.parser import command_parser
from bench.parts.engine_start import start_table, started
from bench.parts.offline import engine_core, held_out, lines, model_runner
from bench.provenance import provenance
from bench.sweep.journal import Journal
from bench.systems.commands import Shared, in_process
from bench.systems.method import Method, largest_k, parse, servers
from bench.systems.model_free import ARCHITECTURES
from drafters.markdown import columns

METHODS = "none,plain,vllm:3,vllm:7,vllm:11,off,k:3,k:7,k:11"
BATCHES = "1,8,32,128"
OUTPUT_TOKENS = 128
WARM_UP_TOKENS = 16
FEWEST = 4  # steps that a figure needs
START = "start"  # instead of a method, in the key of what an engine's start came to

Cells = Mapping[tuple[Any, ...], Mapping[str, Any]]  # (method, batch) -> figures


@reports_errors("aerie bench")
def main(argv: Sequence[str]) -> int:
    """Measure what is missing, print the tables; returns the exit code."""
    args = _parser().parse_args(argv)
    methods = parse(args.methods)
    given = options.settings(args.set) | {"max_num_seqs": max(args.batch)}
    folder = args.out.parent / f"{args.out.stem}-model-free"
    shared = Shared.of(largest_k(methods), given, args.eagle3, args.model_free, folder)
    if args.offline:
        for result in measure(servers(methods)[args.offline], shared, args.batch):
            print("\n" + json.dumps(result), flush=True)
        return 0
    if any(method.kind == "adaptive" for method in methods):
        raise ValueError("a step has one K: leave out `adaptive`")
    journal = Journal(args.out)
    plan = {name: getattr(args, name) for name in ("methods", "batch", "model_free", "set")}
    plan |= {"eagle3": options.head_name(args.eagle3), "environment": options.environment()}
    journal.begin(plan, provenance(["device", *argv]))
    for server, group in servers(methods).items():
        if all((method.name, batch) in journal.cells for method in group for batch in args.batch):
            continue
        tell(f"starting {server}")
        _, environment = in_process(group[0], shared)
        for cell in lines("bench.parts.device", [server, *argv], environment):
            if "start" in cell:
                journal.add((START, server), cell.pop("start"))
            else:
                journal.add((cell.pop("method"), cell.pop("batch")), cell)
    print("\n".join(tables(methods, args.batch, journal.cells)))
    return 0


@dataclass(slots=True)
class TimedStep:
    """A step that the model runner was given, with marks of a `Clock`."""

    requests: int
    tokens: int
    reads: bool  # whether it reads a prompt, or part of one
    begun: Any
    draft_begun: Any = None
    draft_ended: Any = None

    def is_steady(self, batch: int, k: int) -> bool:
        """Whether it counts: no prompt is read, and all of `batch` requests verify K drafts."""
        return not self.reads and self.requests == batch and self.tokens == batch * (1 + k)


class Clock:
    """Marks times on the device's stream, without waiting; on a CPU, by the clock."""

    def __init__(self, device: Any) -> None:
        self._on_gpu = device.type == "cuda"

    def mark(self) -> Any:
        """A mark at this point of the device's stream, or at the present time on a CPU."""
        if not self._on_gpu:
            return perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, since: Any, until: Any) -> float:
        """Milliseconds between two marks that the device has passed."""
        return float(since.elapsed_time(until) if self._on_gpu else 1e3 * (until - since))

    def wait(self) -> None:
        """Wait until the device has passed every mark."""
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()


def watch(runner: Any, clock: Clock) -> list[TimedStep]:
    """Record every step that a vLLM model runner, V1's or V2's, is given from now on. Returns the
    list that steps are added to."""
    steps: list[TimedStep] = []
    execute = runner.execute_model

    def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduled.total_num_scheduled_tokens:
            cached = scheduled.scheduled_cached_reqs
            reads = bool(scheduled.scheduled_new_reqs) or any(
                cached.is_context_phase(name) for name in cached.req_ids
            )
            count, tokens = len(scheduled.num_scheduled_tokens), scheduled.num_scheduled_tokens
            steps.append(TimedStep(count, sum(tokens.values()), reads, clock.mark()))
        return execute(scheduled, *args, **kwargs)

    runner.execute_model = execute_model
    # V2's speculator, or None; on V1 the runner itself asks its drafter.
    v2 = hasattr(runner, "speculator")
    owner, name = (runner.speculator, "propose") if v2 else (runner, "propose_draft_token_ids")
    if owner is not None:
        setattr(owner, name, _marked(getattr(owner, name), steps, clock))
    return steps


def _marked(
    propose: Callable[..., Any], steps: list[TimedStep], clock: Clock
) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        begun = clock.mark()
        try:
            return propose(*args, **kwargs)
        finally:
            if steps:
                steps[-1].draft_begun, steps[-1].draft_ended = begun, clock.mark()

    return marked


def measure(
    group: Sequence[Method], shared: Shared, batches: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Start the engine of `group`, methods that share it, and measure each at each batch. Yields
    what the start came to as `{"start": figures}`, then a cell for each method and batch."""
    from vllm import SamplingParams

    arguments, _ = in_process(group[0], shared)
    llm, start = started(arguments)
    yield {"start": start}
    runner = model_runner(llm)
    clock = Clock(runner.device)
    steps = watch(runner, clock)
    held = held_out(max(batches))
    for method in group:
        if method.changes is not None:
            engine_core(llm).scheduler.speculation("steer", method.changes)
        for batch in batches:
            asked: Any = [{"prompt_token_ids": held[i % len(held)]} for i in range(batch)]
            for tokens in (WARM_UP_TOKENS, OUTPUT_TOKENS):
                steps.clear()
                sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
                llm.generate(asked, sampling, use_tqdm=False)
            clock.wait()
            yield {"method": method.name, "batch": batch, **figures(steps, clock, batch, method.k)}


def figures(steps: Sequence[TimedStep], clock: Clock, batch: int, k: int) -> dict[str, Any]:
    """The number of a cell's steady steps, and their median times in milliseconds."""
    steady = [(a, b) for a, b in pairwise(steps) if a.is_steady(batch, k) and b.is_steady(batch, k)]
    found: dict[str, Any] = {"k": k, "steps": len(steady)}
    if len(steady) < FEWEST:
        return found
    found["step_ms"] = round(median(clock.milliseconds(a.begun, b.begun) for a, b in steady), 4)
    if k:
        drafts = (clock.milliseconds(a.draft_begun, a.draft_ended) for a, _ in steady)
        found["draft_ms"] = round(median(drafts), 4)
    return found


def tables(methods: Sequence[Method], batches: Sequence[int], cells: Cells) -> list[str]:
    """Markdown tables of the times, and of their ratios to vLLM's, without those that are empty."""

    def grid(title: str, show: Callable[[Method, int], float | None]) -> list[str]:
        rows = [["batch", *(method.label for method in methods)]]
        for batch in batches:
            values = [show(method, batch) for method in methods]
            rows.append([str(batch), *("" if v is None else f"{v:.3f}" for v in values)])
        is_empty = not any(any(row[1:]) for row in rows[1:])
        return [] if is_empty else ["", title, *columns(rows)]

    def of(name: str, method: Method, batch: int) -> float | None:
        return cells.get((method.name, batch), {}).get(name)

    def over(method: Method, batch: int) -> float | None:
        same_head = Method("eagle3" if method.head else "vllm", method.k)
        peer = {"k": same_head, "off": Method("plain"), "plain": Method("none")}
        other = peer.get(method.kind)
        ours, theirs = of("step_ms", method, batch), other and of("step_ms", other, batch)
        return ours / theirs if ours and theirs else None

    lines = [
        *grid("A step, ms (from its beginning to that of the next):", partial(of, "step_ms")),
        *grid("The drafter's pass in it, ms:", partial(of, "draft_ms")),
        *grid(
            "A step at K over that of vLLM with the same kind of head, at K = 0 over no head, "
            "without a head over none:",
            over,
        ),
        *start_table({key[1]: cell for key, cell in cells.items() if key[0] == START}),
    ]
    return lines[1:]  # without the empty line before the first table


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("device", __doc__)
    add = parser.add_argument
    add("--offline", metavar="SERVER", help=argparse.SUPPRESS)
    add("--methods", default=METHODS, help=f"[{METHODS}]")
    add("--batch", type=options.counts, default=options.counts(BATCHES), metavar="N,N",
        help=f"requests that decode together [{BATCHES}]")  # fmt: skip
    add("--model-free", default="", metavar="ARCHITECTURE",
        help=f"as in a sweep: {', '.join(ARCHITECTURES)}")  # fmt: skip
    options.add_engines(parser)
    add("--out", type=Path, default=Path("runs/device.jsonl"), metavar="FILE",
        help="results; the same command continues from there [runs/device.jsonl]")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
