"""What preloading an OpenMP or an allocator library gains on a CPU.

Each measurement is a fresh engine: preloading works at process start only. The arms take
turns, so that whatever else the machine does falls on all of them alike.

    python -m bench.preload --rounds 5 --k 5

Prints one JSON line per measurement, then per arm the ratio of medians to the first arm.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable

OUTPUT_TOKENS = 96
CONCURRENCY = (1, 16)
REPEATS = 3
WARM_UPS = 2


def libraries() -> dict[str, str]:
    """The candidates that are installed: name -> path."""
    patterns = {
        "iomp": f"{sys.prefix}/lib/libiomp5.so",
        "tcmalloc": "/usr/lib/*/libtcmalloc_minimal.so.4",
    }
    found = {name: sorted(glob.glob(pattern)) for name, pattern in patterns.items()}
    return {name: paths[0] for name, paths in found.items() if paths}


def arms() -> dict[str, str]:
    """Arm -> LD_PRELOAD. `plain` is what vLLM does by itself: torch's own libgomp."""
    found = libraries()
    preloads = {"plain": "", **found}
    if len(found) == 2:
        preloads["both"] = ":".join(found.values())
    return preloads


def measure(k: int) -> None:
    """One engine of the embedded model; prints tokens per second for each concurrency."""
    from vllm import LLM, SamplingParams

    from app.engine.options import engine_options
    from app.settings import load

    settings = load({"k": k}, {}, preset="embedded")
    began = time.perf_counter()
    engine = LLM(**{**engine_options(settings), "served_model_name": None})
    figures: dict[str, float] = {"start_s": time.perf_counter() - began}
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    for concurrency in CONCURRENCY:
        prompts = [f"def function_{i}(values):\n    " for i in range(concurrency)]
        rates = []
        for _ in range(WARM_UPS + REPEATS):
            started = time.perf_counter()
            engine.generate(prompts, params, use_tqdm=False)
            rates.append(concurrency * OUTPUT_TOKENS / (time.perf_counter() - started))
        figures[f"tok_s_c{concurrency}"] = statistics.median(rates[WARM_UPS:])
    print(json.dumps({name: round(figure, 1) for name, figure in figures.items()}))


def run(k: int, preload: str) -> dict[str, float]:
    """`measure` in a process of its own, with LD_PRELOAD as the gateway would hand it on."""
    environment = {**os.environ, "LD_PRELOAD": preload, "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "bench.preload", "--measure", "--k", str(k)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def summary(results: dict[str, list[dict[str, float]]]) -> Iterable[dict[str, object]]:
    """Per arm: medians, and their ratio to the first arm's."""
    base = next(iter(results))
    for arm, figures in results.items():
        line: dict[str, object] = {"arm": arm, "runs": len(figures)}
        for name in figures[0]:
            here = statistics.median(figure[name] for figure in figures)
            there = statistics.median(figure[name] for figure in results[base])
            ratios = [a[name] / b[name] for a, b in zip(figures, results[base], strict=True)]
            line[name] = here
            line[f"{name}_ratio"] = round(here / there, 3)
            line[f"{name}_pairs"] = [round(min(ratios), 3), round(max(ratios), 3)]
        yield line


def main() -> None:
    """Interleaved rounds over all arms."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--k", type=int, default=5, help="draft tokens per step; 0: no drafter")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.k)
        return
    results: dict[str, list[dict[str, float]]] = defaultdict(list)
    order = list(arms().items())
    for number in range(options.rounds):
        # Every other round runs backwards: no arm always follows the same one.
        for arm, preload in order if number % 2 == 0 else reversed(order):
            figures = run(options.k, preload)
            results[arm].append(figures)
            print(json.dumps({"k": options.k, "round": number, "arm": arm, **figures}), flush=True)
    for line in summary({arm: results[arm] for arm, _ in order}):
        print(json.dumps({"k": options.k, **line}))


if __name__ == "__main__":
    main()
