"""Drafts of vLLM's V2 runner against the torch module: in bfloat16, with CUDA graphs, on a GPU.

Weights are random, and drafts are accepted at random, so that steps with every number of accepted
drafts occur. K changes every few steps, to 0 too.

The reference computes the same weights in the next wider type. The largest error of a logit in
plain torch, in the engine's type, is what that type costs. The engine's logits may be off by twice
as much (its kernels sum in another order), and so may both logits of a pair: a draft is right if
its logit in the wider type is at most four such errors below the largest. How many tokens of the
vocabulary that admits is reported. If it were many, the comparison would notice nothing.
"""

from __future__ import annotations

import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from bench.gpu_check.part_report import PartReport
from bench.gpu_check.random_models import ModelShape, Reference, write
from bench.parts.engine_start import start_table, started
from bench.parts.offline import engine_core, model_runner
from drafters.model.config import Method

SHAPES = {
    "cuda": ModelShape(1024, 16, layers=6, kv_heads=4, vocabulary=8192),
    "cpu": ModelShape(64, 1, kv_heads=1),
}
K = {"cuda": 7, "cpu": 3}
REQUESTS = {"cuda": 16, "cpu": 2}
OUTPUT_TOKENS = {"cuda": 128, "cpu": 40}
COMPARED = {"cuda": 256, "cpu": 64}  # steps of requests, evenly chosen
STEPS_OF_A_K = 4
ERRORS = 4.0  # that a right draft may be below the largest logit
MOST_ADMITTED = 0.05  # share of the vocabulary
ACCEPTANCE = 0.75  # of each draft, if those before it are accepted
WIDER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}


@dataclass(frozen=True, slots=True)
class Drafted:
    """The drafts of a request in a step, after the text so far."""

    text: list[int]
    drafts: list[int]
    in_graph: bool


def p_eagle(report: PartReport) -> None:
    """Drafts of our P-EAGLE speculator."""
    _run(report, "p-eagle")


def eagle3(report: PartReport) -> None:
    """Drafts of the EAGLE-3 speculator that the engine takes."""
    _run(report, "eagle3")


def _run(report: PartReport, method: Method) -> None:
    dtype = torch.bfloat16
    if report.on_cpu:
        dtype = torch.float32
        report.skip("bfloat16", "Triton's interpreter multiplies its bits as integers")
        report.skip("FlashAttention 3 and CUDA graphs", "a CPU has neither")
        _interpret_triton()
    places = write(SHAPES[report.device], method, dtype, report.folder)
    llm, start = started(_arguments(report, method, dtype, places))
    report.add(start=start)
    report.show(start_table({method: start}))
    if start["runner"] != "V2":
        raise RuntimeError(f"the drafter runs on vLLM's {start['runner']} runner")
    with recorded(model_runner(llm)) as drafted:
        _generate(llm, report.device)
    chosen = drafted[:: max(1, len(drafted) // COMPARED[report.device])]
    found = compare(
        chosen,
        Reference(places, WIDER[dtype], report.device).logits,
        Reference(places, dtype, report.device).logits,
    )
    found["steps"] = len(drafted)
    found["in_graphs"] = sum(step.in_graph for step in drafted)
    found["by_k"] = dict(sorted(Counter(len(step.drafts) for step in drafted).items()))
    report.add(**found)
    report.show(
        [f"{name.replace('_', ' ')}: {value}" for name, value in found.items()],
        f"{found['wrong']} of {found['drafts']} drafts wrong, {found['largest']} are the largest "
        f"logit; {found['in_graphs']} of {len(drafted)} in graphs",
    )
    judge(report, found)


def judge(report: PartReport, found: dict[str, Any]) -> None:
    """Note as failures what of the comparison's figures must not be."""
    if found["wrong"]:
        report.fail(f"{found['wrong']} of {found['drafts']} drafts are wrong")
    if found["drafts"] < 2 * COMPARED[report.device] // 3:
        report.fail(f"no more than {found['drafts']} drafts were compared")
    if found["admitted"] > MOST_ADMITTED:
        report.fail(f"the tolerance admits {found['admitted']:.1%} of the vocabulary")
    if not report.on_cpu and not found["in_graphs"]:
        report.fail("no draft was made in a CUDA graph")


def compare(
    steps: list[Drafted],
    exact: Callable[[list[int], list[int]], torch.Tensor],
    plain: Callable[[list[int], list[int]], torch.Tensor],
) -> dict[str, Any]:
    """Figures of the drafts of `steps`. `exact` and `plain` compute the logits of a text and its
    drafts, `[drafts, vocabulary]`: in a wider type, and by plain torch in the engine's type."""
    rows = [(exact(step.text, step.drafts), step.drafts) for step in steps]
    error = max(
        float((plain(step.text, step.drafts).to(row.dtype) - row).abs().max())
        for step, (row, _) in zip(steps, rows, strict=True)
    )
    tolerance = ERRORS * error
    below: list[float] = []
    admitted: list[float] = []
    for row, drafts in rows:
        short = row.max(-1, keepdim=True).values - row
        chosen = torch.tensor(drafts, device=row.device)[:, None]
        below += short.gather(1, chosen)[:, 0].tolist()
        admitted += (short <= tolerance).double().mean(-1).tolist()
    return {
        "drafts": len(below),
        "wrong": sum(value > tolerance for value in below),
        "largest": sum(value == 0 for value in below),
        "furthest_below": max(below),
        "error_of_plain_torch": error,
        "tolerance": tolerance,
        "admitted": sum(admitted) / len(admitted),
    }


@contextmanager
def recorded(runner: Any) -> Iterator[list[Drafted]]:
    """Record the drafts of a V2 runner's speculator, ours or vLLM's, with the texts."""
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    steps: list[Drafted] = []
    speculator, requests = runner.speculator, runner.req_states
    propose = speculator.propose
    signature = inspect.signature(BaseSpeculator.propose)  # ours may hand arguments on unnamed
    replay, replays = torch.cuda.CUDAGraph.replay, Counter[str]()

    def replayed(graph: Any) -> None:
        replays["graphs"] += 1
        replay(graph)

    def proposed(*args: Any, **kwargs: Any) -> Any:
        before = replays["graphs"]
        drafts = propose(*args, **kwargs)
        given = signature.bind(speculator, *args, **kwargs).arguments
        k = given.get("num_speculative_tokens")
        k = drafts.shape[1] if k is None else k
        if given.get("dummy_run") or not k:
            return drafts
        batch = given["input_batch"]
        for row, slot in enumerate(batch.idx_mapping_np[: batch.num_reqs]):
            length = int(requests.total_len.gpu[slot])
            if int(given["num_sampled"][row]) and length + k < requests.max_model_len:
                text = requests.all_token_ids.gpu[slot, :length].tolist()
                in_graph = replays["graphs"] > before
                steps.append(Drafted(text, drafts[row, :k].tolist(), in_graph))
        return drafts

    speculator.propose = proposed
    try:
        with patch.object(torch.cuda.CUDAGraph, "replay", replayed):
            yield steps
    finally:
        del speculator.propose


def _generate(llm: Any, device: str) -> None:
    """Serve all requests in one batch, with another K every few steps."""
    from vllm import SamplingParams

    engine, scheduler = llm.llm_engine, engine_core(llm).scheduler
    sampling = SamplingParams(
        temperature=0.0, max_tokens=OUTPUT_TOKENS[device], ignore_eos=True, detokenize=False
    )
    for number in range(REQUESTS[device]):
        prompt: Any = {"prompt_token_ids": list(range(5, 16 + 7 * number))}
        engine.add_request(str(number), prompt, sampling)
    k_max = K[device]
    for k in cycle((k_max, 1, k_max // 2, 0, k_max)):
        changes = {"objective": "fixed", "k": k} if k else {"objective": "off"}
        scheduler.speculation("steer", changes)
        for _ in range(STEPS_OF_A_K):
            if not engine.has_unfinished_requests():
                return
            engine.step()


def _arguments(
    report: PartReport, method: Method, dtype: torch.dtype, places: dict[str, Any]
) -> dict[str, Any]:
    """Arguments of a vLLM `LLM`, by the gateway's own way from settings to them."""
    from app.engine.configuration.cpu import cpu_machine
    from app.engine.configuration.options import engine_options
    from app.settings import load

    k = K[report.device]
    given = {
        "model": str(places["target"]), "drafter": str(places["head"]), "k": k,
        "dtype": str(dtype).removeprefix("torch."), "max_num_seqs": REQUESTS[report.device],
        "kv_cache_gib": 0.0625 if report.on_cpu else 1.0, "enable_prefix_caching": False,
    }  # fmt: skip
    machine = cpu_machine() if report.on_cpu else None
    options = engine_options(load(given, {}), machine, method=method, v2=True)
    accepted = [round(ACCEPTANCE**position, 6) for position in range(1, k + 1)]
    options["speculative_config"] |= {
        "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": accepted,
    }  # fmt: skip
    if report.on_cpu:
        # vLLM's CPU platform schedules one step after another.
        scheduler = "drafters.vllm.scheduling.scheduler.DraftingScheduler"
        options |= {"enforce_eager": True, "block_size": 32, "scheduler_cls": scheduler}
    return {**options, "served_model_name": None, "skip_tokenizer_init": True}


def _interpret_triton() -> None:
    """Have Triton's interpreter run the kernels of vLLM's V2 runner, before vLLM is imported: a
    build of Triton for CPUs is published nowhere."""
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    import triton.backends

    driver = SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = SimpleNamespace(driver=driver)
