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
    "overload": ("bench.served.overload", "a gateway at four times the load that it can take"),
    "disturbance": ("bench.served.disturbance", "drafting beside a busy process, and after it"),
    "quality": (
        "bench.quality.check_answers",
        "HumanEval with drafts and without: the same, and right?",
    ),
    "interop": ("bench.served.interop", "the same server under `vllm bench serve` and under ours"),
    "ceiling": ("bench.served.ceiling", "what the client itself can take"),
    "prompts": ("bench.workloads.print_prompts", "a workload as JSON lines"),
    "step": ("bench.parts.step", "where the time of a step goes"),
    "device": ("bench.parts.device", "what a step and the drafter's pass take, ours beside vLLM's"),
    "proposer": ("bench.parts.proposer", "our drafter against vLLM's, with and without drafts"),
    "context": ("bench.parts.context", "acceptance by length, at limits of the drafter's context"),
    "kernels": ("bench.kernels.time_kernels", "kernels of the drafting path against vLLM's"),
    "openmp": ("bench.parts.openmp", "OpenMP runtimes of a CPU engine, quiet and disturbed"),
    "training-memory": ("bench.parts.training_memory", "peak memory and time of a training step"),
}


def main(argv: Sequence[str]) -> int:
    """Run one subcommand; returns the exit code."""
    if argv and argv[0] in COMMANDS:
        return int(importlib.import_module(COMMANDS[argv[0]][0]).main(list(argv[1:])))
    usage = ["usage: aerie bench COMMAND [--help]", "", __doc__ or "", ""]
    usage += [f"  {name:15} {text}" for name, (_, text) in COMMANDS.items()]
    if argv and argv[0] in ("-h", "--help"):
        print("\n".join(usage))
        return 0
    if argv:
        usage += ["", f"aerie bench: no command {argv[0]!r}"]
    print("\n".join(usage), file=sys.stderr)
    return 2
