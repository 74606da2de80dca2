"""`aerie bench openmp`: OpenMP runtimes of a CPU engine, on a quiet machine and on a busy one.

    aerie bench openmp --rounds 3 --k 0

The model's threads meet at barriers hundreds of times a step. How a thread waits there decides
what happens when another process has taken the core of a thread that it waits for. Two runtimes
(arms) are compared: `libgomp`, which comes with torch and which vLLM preloads, and `gateway`, that
of the gateway's engine (app/engine/configuration/cpu.py). A runtime is preloaded when a process
starts, so that each measurement has a new engine; the arms take turns. With each engine, windows on
the quiet machine alternate with windows beside one process that computes without end (in a session
of its own, like another terminal's).

Prints one JSON line per engine (tokens per second by users), then one line per arm: medians over
all windows, and their ratio to the first arm's.
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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from app.engine.configuration.cpu import cpu_machine, environment, libraries
from bench.errors import reports_errors
from bench.load.busy import busy_process
from bench.parser import command_parser
from drafters.train.number_options import positive_int

OUTPUT_TOKENS = 16  # so few that a window ends in time even if a step takes a second
USERS = (1, 8)
WINDOWS = 3  # windows of each kind with one engine
SECONDS = 4.0  # least length of a window
PRESET = "smollm2-135m"


def arms() -> dict[str, dict[str, str]]:
    """Arm -> environment of its process. Without LD_PRELOAD vLLM preloads torch's own libgomp."""
    plain = {name: text for name, text in os.environ.items() if name not in libraries({})}
    return {"libgomp": plain, "gateway": {**plain, **environment(plain)}}


def measure(k: int) -> None:
    """Measure an engine in this process; prints tokens/s as {"quiet_1": [...], "busy_1": [...],
    ...}, by users."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from app.engine.configuration.options import engine_options
    from app.settings import load
    from drafters.packaged import resolve
    from drafters.train.data.humaneval import chat_prompt, problems

    options = engine_options(load({"k": k}, {}, preset=PRESET), cpu_machine())
    options["model"] = resolve(options["model"])
    llm = LLM(**{**options, "served_model_name": None})
    prompts: Any = [
        [{"role": "user", "content": chat_prompt(problem)}] for problem in problems()[: max(USERS)]
    ]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)

    def rate(users: int) -> float:
        began, tokens = time.perf_counter(), 0
        while time.perf_counter() < began + SECONDS:
            answers = llm.chat(prompts[:users], params, use_tqdm=False)
            tokens += sum(len(answer.outputs[0].token_ids) for answer in answers)
        return round(tokens / (time.perf_counter() - began), 1)

    for users in USERS:
        rate(users)
    rates: dict[str, list[float]] = defaultdict(list)
    for _ in range(WINDOWS):
        for users in USERS:
            rates[f"quiet_{users}"].append(rate(users))
            with busy_process():
                rates[f"busy_{users}"].append(rate(users))
    print(json.dumps(rates))


def run(k: int, variables: Mapping[str, str]) -> dict[str, list[float]]:
    """Run `measure` in a process of its own with this environment. Raises RuntimeError."""
    command = [sys.executable, "-m", "bench.parts.openmp", "--measure", "--k", str(k)]
    child = {**variables, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, env=child, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"an engine ended with code {done.returncode}; its error is above")
    rates: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return rates


def summary(results: Mapping[str, Mapping[str, list[float]]]) -> Iterator[dict[str, object]]:
    """One line per arm: medians, and their ratio to those of the first arm."""
    base = next(iter(results.values()))
    for arm, rates in results.items():
        line: dict[str, object] = {"arm": arm}
        for kind, figures in rates.items():
            median = statistics.median(figures)
            line[kind] = median
            line[f"{kind}_ratio"] = round(median / statistics.median(base[kind]), 3)
        yield line


@reports_errors("aerie bench")
def main(argv: Sequence[str]) -> int:
    """Measure both arms in interleaved rounds; returns the exit code."""
    parser = command_parser("openmp", __doc__)
    parser.add_argument("--k", type=int, default=0, help="draft tokens per step; 0: no drafter [0]")
    parser.add_argument("--rounds", type=positive_int, default=3, help="engines of each arm [3]")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.measure:
        measure(options.k)
        return 0
    results: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    order = list(arms().items())
    for number in range(options.rounds):
        # Every other round runs in reverse order, so that no arm always follows the same one.
        for arm, variables in order if number % 2 == 0 else reversed(order):
            rates = run(options.k, variables)
            print(json.dumps({"k": options.k, "round": number, "arm": arm, **rates}), flush=True)
            for kind, figures in rates.items():
                results[arm][kind] += figures
    for line in summary({arm: results[arm] for arm, _ in order}):
        print(json.dumps({"k": options.k, **line}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
