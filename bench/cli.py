"""`aerie bench`: measure a server, compare methods, and write down how it was done."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# name -> (module with main(argv) -> exit code, help)
COMMANDS = {
    "run": ("bench.served.run", "load on servers that are up"),
    "sweep": ("bench.sweep.sweep_methods", "methods against concurrency, engines started here"),
    "trace": ("bench.trace.trace_methods", "a moving load, adaptive K against every fixed K"),
    "speedup": ("bench.served.speedup", "the gateway's speed-up gauge against measured speed-ups"),
    "disturbance": ("bench.served.disturbance", "drafting beside a busy process, and after it"),
    "quality": (
        "bench.quality.check_answers",
        "HumanEval with drafts and without: the same, and right?",
    ),
    "interop": ("bench.served.interop", "the same server under `vllm bench serve` and under ours"),
    "prompts": ("bench.workloads.print_prompts", "a workload as JSON lines"),
    "ceiling": ("bench.served.ceiling", "what the client itself can take"),
    "step": ("bench.parts.step", "where the time of a step goes"),
    "device": ("bench.parts.device", "what a step and the drafter's pass take, ours beside vLLM's"),
    "kernels": ("bench.kernels.time_kernels", "kernels of the drafting path against vLLM's"),
}


def main(argv: Sequence[str]) -> int:
    """Run one subcommand; returns the exit code."""
    if argv and argv[0] in COMMANDS:
        return int(importlib.import_module(COMMANDS[argv[0]][0]).main(list(argv[1:])))
    usage = ["usage: aerie bench COMMAND [--help]", "", __doc__ or "", ""]
    usage += [f"  {name:11} {text}" for name, (_, text) in COMMANDS.items()]
    asked = bool(argv) and argv[0] in ("-h", "--help")
    print("\n".join(usage), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2
