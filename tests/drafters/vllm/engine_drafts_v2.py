"""Record our speculators' drafts on vLLM's V2 model runner: a script like engine_drafts.py.

V2 needs Triton, and on a CPU a build of it that nobody publishes. Triton's interpreter replaces it,
so that every kernel of the runner runs in Python. If a job asks for graphs, the calls that a CUDA
graph would record are run each time, from the same buffers and for a full batch. On a GPU, kernels
and CUDA graphs are the real ones, but not the attention: FlashAttention has no float32.

A step has three more fields: "graph", K of the graph that it drafted in or 0; "padded", how many
requests padded that graph; "waits", how often the host waited for a GPU meanwhile.

An engine of the job has "prompts" for the head of its start; those that take its place draft for
"swapped" of the job, {"prompts": [[id, ...], ...], "max_tokens": n}. The result has for each engine
the steps of each head, in order.
"""

# ruff: noqa: E402
# What decides how Triton and vLLM load comes first.
from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
ON_CPU = not torch.cuda.is_available()
if ON_CPU:
    torch.set_num_threads(1)  # more would only wait for each other
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.append(str(Path(__file__).parents[2] / "e2e" / "v2_on_cpu"))
    import triton_on_cpu

    triton_on_cpu.install()

from engine_drafts import RestlessScheduler
from engines import WORKER, generate, greedy, main, new_engine, one_by_one, swap_head
from vllm import LLM, SamplingParams
from vllm.config.compilation import CUDAGraphMode
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.sample import sampler, states
from vllm.v1.worker.gpu.spec_decode.dflash.cudagraph import DFlashCudaGraphManager
from vllm.v1.worker.gpu.warmup import warmup_kernels

from drafters.config import MAX_K
from drafters.ops import inputs_triton
from drafters.vllm.scheduling.scheduler import AsyncDraftingScheduler
from drafters.vllm.v2 import graphs
from drafters.vllm.v2.runner import V2DraftingRunner
from drafters.vllm.v2.sequential import SequentialSpeculator
from drafters.vllm.v2.speculator import ParallelSpeculator

if ON_CPU:  # the interpreter cannot run vLLM's kernel of top-k and top-p
    sampler.apply_top_k_top_p = states.apply_top_k_top_p = apply_top_k_top_p_pytorch
    inputs_triton.STEPS = 4  # the search finds 16 requests, of 8,192, in a third of the time

Step = dict[str, Any]

LIMIT = 2
_propose = {kind: kind.propose for kind in (ParallelSpeculator, SequentialSpeculator)}
_sample = V2DraftingRunner.sample
_run = graphs.Graphs.run


class RestlessAsyncScheduler(RestlessScheduler, AsyncDraftingScheduler):
    pass


@contextmanager
def waits() -> Iterator[list[warnings.WarningMessage]]:
    """PyTorch's warnings of calls that wait for a GPU."""
    with warnings.catch_warnings(record=True) as waited:
        warnings.simplefilter("always")
        if not ON_CPU:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waited
        finally:
            if not ON_CPU:
                torch.cuda.set_sync_debug_mode("default")
            waited[:] = [one for one in waited if "synchroniz" in str(one.message)]


def with_infinity(compute_logits: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Logits whose last row has a value that is not finite."""

    def compute(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute_logits(hidden)
        logits[-1, 0] = torch.inf
        return logits

    return compute


def within_blocks(speculator: Any, batch: Any) -> None:
    """No key or value of the pass before lies outside of what its requests own."""
    tables, group = speculator.block_tables, speculator.group
    size, slots = tables.block_sizes[group], tables.slot_mappings[group]
    owned: set[int] = set()
    for row, slot in enumerate(batch.idx_mapping_np):
        count = int(tables.num_blocks.np[group, slot])
        owned.update(tables.input_block_tables[group][row, :count].tolist())
    assert {slot // size for slot in slots.tolist() if slot >= 0} <= owned


@contextmanager
def watched(steps: list[Step], limited: range) -> Iterator[None]:
    """Every drafting step within is appended to `steps`, once for each request. Chance accepts
    drafts instead of the target: those of a random head are never right. Requests whose number is
    in `limited` allow LIMIT drafts. In each step the last row of logits is broken, of which the
    last request must be told, and no other."""
    random = Random(0)
    ran: list[Any] = []  # shape of the graph that this step's pass took

    def sample(self: Any, hidden: Any, batch: Any, grammar: Any) -> Any:
        with patch.object(self.model, "compute_logits", with_infinity(self.model.compute_logits)):
            output, made, rejected = _sample(self, hidden, batch, grammar)
        assert output.num_nans.tolist() == [0] * (batch.num_reqs - 1) + [1]
        drafted = batch.num_draft_tokens_per_req
        for row in range(batch.num_reqs if drafted is not None else 0):
            offered = int(drafted[row])
            if not offered:
                continue
            if int(batch.req_ids[row].split("-")[0]) in limited:
                assert offered <= LIMIT, "more was verified than the request allows"
            begin = int(batch.query_start_loc_np[row]) + 1
            accepted = random.randint(0, offered)
            tokens = output.sampled_token_ids[row]
            tokens[:accepted] = batch.input_ids[begin : begin + accepted]
            tokens[accepted] = random.randrange(200)
            made[row], rejected[row] = accepted + 1, offered - accepted
        return output, made, rejected

    def propose(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        ran.clear()
        with waits() as waited:
            drafts = _propose[type(self)](self, batch, *args, **kwargs)
        within_blocks(self, batch)
        in_graph = {
            "graph": graphs.drafted(ran[0]) if ran else 0,
            "padded": ran[0].num_reqs - batch.num_reqs if ran else 0,
            "waits": len(waited),
        }
        k, made = kwargs.get("num_speculative_tokens", self.k_max), args[4]
        if not k:
            return drafts
        for row, slot in enumerate(batch.idx_mapping_np):
            length = int(self.requests.total_len.gpu[slot])
            text = self.requests.all_token_ids.gpu[slot, :length].tolist()
            if int(made[row]) and length + k < self.max_model_len:
                draft = drafts[row, :k].tolist()
                steps.append({"text": text, "draft": draft, "first": 0, **in_graph})
        return drafts

    def run(self: Any, shape: Any) -> None:
        ran.append(shape)
        _run(self, shape)

    with (
        patch.object(V2DraftingRunner, "sample", sample),
        patch.object(ParallelSpeculator, "propose", propose),
        patch.object(SequentialSpeculator, "propose", propose),
        patch.object(graphs.Graphs, "run", run),
    ):
        yield


def warm_up(worker: Any) -> None:
    """vLLM's, without the kernels of grammars and top_k: the interpreter cannot run them."""
    grammar = worker.model_runner.structured_outputs_worker
    with (
        patch.object(grammar, "apply_grammar_bitmask"),
        patch.object(SamplingParams, "for_sampler_warmup", lambda: SamplingParams(temperature=0)),
    ):
        warmup_kernels(worker.model_runner, worker.execute_model, worker.sample_tokens)


def record(worker: Any) -> None:
    """Have the speculator record its graphs, none of which is one."""
    speculator = worker.model_runner.own_speculator
    newest: list[Any] = []  # attention's metadata, which a graph would find in its own buffers

    def build(*args: Any, **kwargs: Any) -> Any:
        newest[:] = [ParallelSpeculator._build_attn_metadata(speculator, *args, **kwargs)]
        return newest[0]

    def capture(
        self: Any, generate: Any, buffers: Any, tables: Any, groups: Any, kv_cache: Any,
        *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        for shape in self._capture_descs[CUDAGraphMode.FULL]:
            mapping = tables.get_dummy_slot_mappings(shape.num_tokens)
            slots = build_slot_mappings_by_layer(mapping, kv_cache)

            def replay(shape: Any = shape, slots: Any = slots) -> None:
                generate(shape.num_reqs, shape.num_tokens, newest.pop(), slots, None)

            self.graphs[shape] = SimpleNamespace(replay=replay)
        self._graphs_captured = True

    speculator._build_attn_metadata = build
    speculator.attn_cg_support = SimpleNamespace(min_cg_support=AttentionCGSupport.ALWAYS)
    speculator.vllm_config.compilation_config.max_cudagraph_capture_size = 512
    with (
        patch.object(type(current_platform), "get_global_graph_pool", lambda self: None),
        patch.object(graphs, "head_batches", lambda k, sequences, *_: [sequences]),
        patch.object(DFlashCudaGraphManager, "capture", capture),
    ):
        speculator.init_cudagraph_manager(CUDAGraphMode.FULL_DECODE_ONLY)
        speculator.capture()


def generated(
    engine: LLM, prompts: list[list[int]], tokens: int, limited: range = range(0)
) -> list[Step]:
    """The drafting steps of these prompts, all of them in one batch."""
    steps: list[Step] = []
    sampling = [
        greedy(tokens, extra_args={MAX_K: LIMIT} if number in limited else None)
        for number in range(len(prompts))
    ]
    with watched(steps, limited):
        generate(engine, prompts, sampling)
    return steps


def drafted(job: dict[str, Any], arguments: dict[str, Any]) -> list[list[Step]]:
    """Start an engine, and generate with each head in turn."""
    in_graphs, overlapped = arguments.pop("graphs"), arguments["async_scheduling"]
    prompts, swaps, swapped = arguments.pop("prompts"), arguments.pop("swaps"), job["swapped"]
    engine = new_engine(
        **arguments,
        scheduler_cls=RestlessAsyncScheduler if overlapped else RestlessScheduler,
        worker_cls=WORKER,
        enforce_eager=ON_CPU,
        max_num_seqs=2,
    )
    if ON_CPU:  # as a GPU's worker does
        engine.collective_rpc(warm_up)
        if in_graphs:
            engine.collective_rpc(record)
    limited = range(1, len(prompts), 3)
    result = [generated(engine, prompts, job["max_tokens"], limited)]
    for head in swaps:
        answers = swap_head(engine, head)
        assert not any("error" in answer for answer in answers), answers
        result.append(generated(engine, swapped["prompts"], swapped["max_tokens"]))
    return result


if __name__ == "__main__":
    main(lambda job: one_by_one(partial(drafted, job), job["engines"]))
