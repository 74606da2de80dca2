"""`aerie bench`: measure servers, compare methods, and record how it was done."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

# name -> (module with main(argv) -> exit code, help)
COMMANDS = {
    "run": ("bench.served.run", "put load on running servers"),
    "sweep": ("bench.sweep.sweep_methods", "compare methods by concurrency, on engines of its own"),
    "trace": ("bench.trace.trace_methods", "adaptive K against every fixed K under a moving load"),
    "speedup": ("bench.served.speedup", "the gateway's speed-up gauge against measured speed-ups"),
    "overload": ("bench.served.overload", "a gateway at four times the load that it can take"),
    "disturbance": ("bench.served.disturbance", "drafting beside a busy process, and after it"),
    "quality": (
        "bench.quality.check_answers",
        "HumanEval answers with drafts and without: whether they are equal and right",
    ),
    "answers": (
        "bench.quality.compare_answers",
        "answers of several methods: valid by their schema, equal, and how fast",
    ),
    "interop": ("bench.served.interop", "one server measured by `vllm bench serve` and by us"),
    "ceiling": ("bench.served.ceiling", "the most load that the client itself can make"),
    "prompts": ("bench.workloads.print_prompts", "a workload as JSON lines"),
    "step": ("bench.parts.step", "where the time of a step goes"),
    "device": ("bench.parts.device", "device time of a step and a drafter's pass, ours and vLLM's"),
    "proposer": ("bench.parts.proposer", "our drafter against vLLM's, and its cost at K = 0"),
    "context": ("bench.parts.context", "acceptance by text length, with limits of the context"),
    "lookup": ("bench.parts.lookup", "time and memory of a lookup, by length of the text"),
    "capture": (
        "bench.parts.capture",
        "capturing sequences to learn from: time of loop and thread",
    ),
    "kernels": ("bench.kernels.time_kernels", "kernels of the drafting path against vLLM's"),
    "gpu-config": ("bench.parts.gpu_config", "vLLM's configuration on GPUs that are not here"),
    "gpu-check": ("bench.gpu_check.check", "all that has to be seen on a GPU, in half an hour"),
    "openmp": ("bench.parts.openmp", "OpenMP runtimes of a CPU engine, on quiet and busy machines"),
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
