"""`aerie bench proposer`: our drafter against vLLM's at a fixed K, and its cost at K = 0.

The engines of the embedded model run in a process each, all on the same core: vLLM's own P-EAGLE,
ours, and two without speculation, whose ratio should be 1 and shows how precise ratios on this
machine are. They take turns on the same held-out prompts, so that whatever else the machine does
affects all of them alike.

    aerie bench proposer --rounds 5 --k 7

Prints one JSON line per measurement, then per batch size and pair the median ratio of tokens per
second over the rounds, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from random import Random
from typing import Any, Self

from app.engine.configuration import cpu
from app.engine.configuration.options import engine_options
from app.settings import load
from bench.errors import reports_errors
from bench.parser import command_parser
from bench.parts.offline import engine_core
from drafters.train.embedded import EMBEDDED
from drafters.train.number_options import positive_int

OUTPUT_TOKENS = 96
SEQUENCES = {1: 4, 8: 16, 16: 32, 32: 64}  # batch -> requests per measurement
# system -> kind of engine. `stock` is upstream vLLM without our code; `plain` and `control` have no
# speculation.
ENGINES = {"stock": "stock", "ours": "ours", "ours at K=0": "ours", "plain": "plain",
           "control": "control"}  # fmt: skip
PAIRS = [("ours", "stock"), ("ours at K=0", "plain"), ("control", "plain")]


def serve(kind: str, k: int) -> None:
    """Run one engine, which reads jobs, lines of {"batch", "k", "round"}, from standard input and
    answers each with a line of figures."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    if kind == "stock":
        os.environ["VLLM_PLUGINS"] = "none"
    from vllm import LLM, SamplingParams

    from drafters.train.embedded.tokenizer import load_tokenizer
    from drafters.train.evaluation.workloads import held_out_prompts

    options = engine_arguments(kind, k)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints to standard output
    engine = LLM(**options)
    prompts = [
        {"prompt_token_ids": ids}
        for pair in zip(
            *held_out_prompts(load_tokenizer(EMBEDDED / "target"), 64).values(), strict=True
        )
        for ids in pair
    ]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    engine.generate(prompts[:32], params, use_tqdm=False)
    print(json.dumps({"ready": kind}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        if kind == "ours":
            engine_core(engine).scheduler.speculation(
                "steer", {"objective": "fixed", "k": job["k"]}
            )
        count = SEQUENCES[job["batch"]]
        started = (job["round"] * count) % len(prompts)
        chosen = (prompts + prompts)[started : started + count]
        began, cpu, before = time.perf_counter(), time.process_time(), _counters(engine)
        for start in range(0, count, job["batch"]):
            engine.generate(chosen[start : start + job["batch"]], params, use_tqdm=False)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        drafts, accepted = (a - b for a, b in zip(_counters(engine), before, strict=True))
        figures = {
            "tok_s": count * OUTPUT_TOKENS / seconds,
            "tok_cpu_s": count * OUTPUT_TOKENS / cpu,
            "acceptance": 1 + accepted / drafts if drafts else 1.0,
        }
        print(json.dumps(figures), file=answers, flush=True)


def engine_arguments(kind: str, k: int) -> dict[str, Any]:
    """Arguments of the vLLM `LLM` of a kind of engine. Heads alone draft: with lookups, vLLM's
    engine would draft as many tokens as the longest lookup."""
    # Prompts are repeated: with a prefix cache, figures would depend on what an engine keeps.
    given: dict[str, Any] = {"max_num_seqs": 32, "enable_prefix_caching": False, "lookup_k": 0}
    given["k"] = k if kind in ("stock", "ours") else 0
    settings = load(given, {}, preset="embedded")
    options = {**engine_options(settings), "served_model_name": None, "disable_log_stats": False}
    if kind == "stock":
        for ours in ("additional_config", "scheduler_cls", "worker_cls"):
            options.pop(ours)
    return options


def _counters(engine: Any) -> tuple[float, float]:
    values = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
    drafts, accepted = (float(values.get(name, 0)) for name in names)
    return drafts, accepted


class EngineProcess:
    """`serve` in a process of its own, which ends with the `with` block."""

    def __init__(self, kind: str, k: int, core: int) -> None:
        command = [sys.executable, "-m", "bench.parts.proposer", "--serve", kind, "--k", str(k)]
        environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": str(core)}
        if kind == "stock":  # it gets our engine's allocator too, so that only drafters differ
            environment["LD_PRELOAD"] = cpu.preload(os.environ)
        else:
            environment |= cpu.environment(os.environ)
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Self:
        self._answer()
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()

    def ask(self, **job: int) -> dict[str, float]:
        """Send a job to the engine's process and wait for its figures."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("an engine has died; its error is above")
        return json.loads(line)


@reports_errors("aerie bench")
def main(argv: Sequence[str]) -> int:
    """Measure every engine at every batch, in interleaved rounds; returns the exit code."""
    parser = command_parser("proposer", __doc__)
    parser.add_argument("--rounds", type=positive_int, default=5, help="[5]")
    parser.add_argument("--k", type=int, default=7, help="draft tokens per step [7]")
    parser.add_argument("--core", type=int, default=0, help="CPU core of all engines [0]")
    parser.add_argument(
        "--batches", type=int, nargs="+", choices=SEQUENCES, default=list(SEQUENCES)
    )
    parser.add_argument("--systems", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--serve", choices=sorted(set(ENGINES.values())), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve:
        serve(options.serve, options.k)
        return 0
    kinds = dict.fromkeys(ENGINES[system] for system in options.systems)
    with ExitStack() as stack:
        engines = {
            kind: stack.enter_context(EngineProcess(kind, options.k, options.core))
            for kind in kinds
        }
        results = measure(engines, options)
    report(results, options)
    return 0


def measure(
    engines: Mapping[str, EngineProcess], options: argparse.Namespace
) -> dict[tuple[int, str], list[float]]:
    """Tokens per second by batch and system, for every round; prints a line of JSON for each."""
    ks = {"ours at K=0": 0}
    results: dict[tuple[int, str], list[float]] = defaultdict(list)
    random = Random(0)
    for number in range(options.rounds):
        for batch in options.batches:
            for system in random.sample(options.systems, len(options.systems)):
                k = ks.get(system, options.k)
                figures = engines[ENGINES[system]].ask(batch=batch, k=k, round=number)
                results[batch, system].append(figures["tok_s"])
                rounded = {name: round(figure, 3) for name, figure in figures.items()}
                line = {"round": number, "batch": batch, "system": system, **rounded}
                print(json.dumps(line), flush=True)
    return results


def report(results: Mapping[tuple[int, str], list[float]], options: argparse.Namespace) -> None:
    """Print the ratios of PAIRS over the rounds, a line of JSON for each batch and pair."""
    for batch in options.batches:
        for one, other in PAIRS:
            if not {one, other} <= set(options.systems):
                continue
            pairs = zip(results[batch, one], results[batch, other], strict=True)
            ratios = sorted(a / b for a, b in pairs)
            print(
                json.dumps(
                    {
                        "batch": batch, "ratio": f"{one} / {other}", "k": options.k,
                        "median": round(statistics.median(ratios), 3),
                        "range": [round(ratios[0], 3), round(ratios[-1], 3)],
                    }
                )
            )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
