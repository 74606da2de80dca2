"""The first minute on a machine: an operation of vLLM's build, then two small engines.

If it fails, everything after it would have failed less clearly.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch

from bench.gpu_check.part_report import PartReport
from bench.parts.engine_start import start_table, started
from bench.parts.offline import held_out
from bench.systems.commands import Shared, in_process
from bench.systems.method import Method

ARCHITECTURE = {"cuda": "qwen3-8b@6", "cpu": "toy"}
REQUESTS, OUTPUT_TOKENS, K = 4, 16, 3
# Relative step of bfloat16: vLLM and torch may round the last bit differently.
BFLOAT16_STEP = 2.0**-7


def run(report: PartReport) -> None:
    """Import vLLM, run an operation of its build, then each kind of engine."""
    begun = perf_counter()
    import vllm

    report.add(import_seconds=round(perf_counter() - begun, 1), vllm=vllm.__version__)
    report.add(operation_error=operation_error(report.device))
    if report.on_cpu:
        report.skip("compilation and CUDA graphs", "a CPU has another compiler and no graphs")
    starts: dict[str, Any] = {}
    stages: dict[str, Callable[[], tuple[Method, dict[str, Any]]]] = {
        "eager, no head": lambda: (Method("plain"), {"enforce_eager": True}),
        "P-EAGLE": lambda: (Method("k", K), {"enforce_eager": report.on_cpu}),
    }
    for name, stage in stages.items():
        starts[name] = _generate(report, *stage())
        report.add(starts=starts)
    took = ", ".join(f"{name} {start['start_seconds']:.0f} s" for name, start in starts.items())
    report.show(start_table(starts), f"started: {took}")


def operation_error(device: str) -> float:
    """The largest relative difference of vLLM's compiled RMSNorm from torch's, in bfloat16.

    Raises RuntimeError if it is above two steps of bfloat16.
    """
    from vllm import _custom_ops as operations
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 512, generator=generator).to(device, torch.bfloat16)
    weight = torch.rand(512, generator=generator).to(device, torch.bfloat16) + 0.5
    computed = torch.empty_like(values)
    operations.rms_norm(computed, values, weight, 1e-6)
    exact = torch.nn.functional.rms_norm(values.double(), (512,), weight.double(), 1e-6)
    error = float(((computed.double() - exact).abs() / exact.abs().clamp_min(1e-3)).max())
    if not error <= 2 * BFLOAT16_STEP:
        raise RuntimeError(f"rms_norm of vLLM's build is off by {error:.3g} of the value")
    return error


def _generate(report: PartReport, method: Method, more: dict[str, Any]) -> dict[str, Any]:
    """Start the engine of `method`, generate, take it down; returns the figures of its start."""
    from vllm import SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    given = {"max_num_seqs": REQUESTS, **more}
    shared = Shared.of(K, given, "", ARCHITECTURE[report.device], report.folder / "models")
    arguments, _ = in_process(method, shared)
    llm, start = started(arguments)
    prompts: Any = [{"prompt_token_ids": ids} for ids in held_out(REQUESTS)]
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    if lengths != [OUTPUT_TOKENS] * REQUESTS:
        raise RuntimeError(f"answers have {lengths} tokens instead of {OUTPUT_TOKENS}")
    del llm
    cleanup_dist_env_and_memory()
    return start
