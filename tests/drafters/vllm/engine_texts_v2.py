"""Generate with the embedded target and its heads on vLLM's V2 model runner: a script that runs in
Triton's interpreter on a CPU, like engine_drafts_v2.py. Its job is

    {"engines": {name: {"head": name, folder, LOOKUP or null, "padded": bool}}}

and its result has for each engine "texts" (tokens of each of REQUESTS by name), "steps" (drafts
that were scheduled and tokens that came of them, for each request that verified some) and counts of
what has happened meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from engine_drafts_v2 import RestlessAsyncScheduler  # before vllm
from engines import WORKER, core_of, main, new_engine, one_by_one
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker, _build_grammar_mapping

from drafters.config import LONGEST_MATCH, MAX_K, SHORTEST_MATCH
from drafters.train.embedded import EMBEDDED
from drafters.vllm.own_drafter import accept_undrafted
from drafters.vllm.scheduling.scheduler import AsyncDraftingScheduler
from drafters.vllm.v2.deferring import DeferringSpeculator
from drafters.vllm.v2.runner import V2DraftingRunner

LOOKUP = "lookup"  # no head: vLLM's own lookup, on the device
K = 4
SHORT, LONG = "def add(a, b):\n    return", "The capital of France is Paris, " * 5
BANNED = dict.fromkeys(range(200, 500), -100.0)  # tokens of frequent words

# Name -> prompt, options. Those whose name says so have the text of the one before it.
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (SHORT, {}),
    "chunked": (LONG, {}),
    "aborted": (LONG, {"max_tokens": 99}),
    "max_k 0": (SHORT, {"extra_args": {MAX_K: 0}}),
    "max_k 1": (SHORT, {"extra_args": {MAX_K: 1}}),
    "biased": (SHORT, {"logit_bias": BANNED}),
    # Of all tokens only the most probable one is left, so that sampling is greedy.
    "min_p": (SHORT, {"min_p": 1.0, "temperature": 1.5, "seed": 5}),
    "sampled": (SHORT, {"temperature": 1.0, "seed": 9}),
    "nucleus": (LONG, {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "seed": 9}),
    "penalised": (LONG, {"repetition_penalty": 1.3, "min_tokens": 12}),
    "structured": (
        SHORT,
        {"structured_outputs": StructuredOutputsParams(regex=r"(one|two|three)( (and|or) \d+)+")},
    ),
}  # fmt: skip


def parameters(options: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, **options})


def apply_grammar(
    self: Any, logits: torch.Tensor, batch: Any, names: list[str], bitmask: Any
) -> None:
    """What vLLM's kernel does, which the interpreter cannot run."""
    mapping = _build_grammar_mapping(
        batch.req_ids, names, batch.cu_num_logits_np, batch.num_draft_tokens_per_req,
        self.num_bonus_tokens, self.mask_stride,
    )  # fmt: skip
    bits = torch.arange(32)
    for index, words in zip(mapping, torch.from_numpy(bitmask.copy()), strict=True):
        request, place = divmod(index, self.mask_stride)
        allowed = ((words[:, None] >> bits) & 1).bool().view(-1)[: logits.shape[1]]
        logits[int(batch.cu_num_logits[request]) + place, ~allowed] = -torch.inf


@contextmanager
def watched(steps: list[dict[str, Any]], counts: Counter[str]) -> Iterator[None]:
    sample, defer, enter = (
        V2DraftingRunner.sample, DeferringSpeculator._defer, DeferringSpeculator._pass
    )  # fmt: skip

    def watch_sample(self: Any, hidden: Any, batch: Any, grammar: Any) -> Any:
        output, made, rejected = sample(self, hidden, batch, grammar)
        drafted = batch.num_draft_tokens_per_req
        begun = batch.is_prefilling_np & (batch.num_computed_prefill_tokens_np > 0)
        counts["chunked"] += bool(begun.any())
        for row, name in enumerate(batch.req_ids if drafted is not None else ()):
            if drafted[row]:
                step = {"request": name, "drafts": int(drafted[row]), "tokens": int(made[row])}
                steps.append(step)
        return output, made, rejected

    def watch_defer(self: Any, *args: Any) -> bool:
        deferred = defer(self, *args)
        counts["deferred"] += deferred
        return deferred

    def watch_pass(self: Any, batch: Any, states: Any, rejected: Any, k: int, **kw: Any) -> None:
        counts["caught up"] += bool(self._held[batch.idx_mapping_np].any())
        enter(self, batch, states, rejected, k, **kw)

    with (
        patch.object(V2DraftingRunner, "sample", watch_sample),
        patch.object(DeferringSpeculator, "_defer", watch_defer),
        patch.object(DeferringSpeculator, "_pass", watch_pass),
        patch.object(StructuredOutputsWorker, "apply_grammar_bitmask", apply_grammar),
    ):
        yield


def dummy_step(worker: Any) -> None:
    """A step of no request, as a GPU's worker runs before the first one: kernels are compiled."""
    worker.model_runner._dummy_run(4)


def result_of(engine: dict[str, Any]) -> dict[str, Any]:
    """Start an engine, and generate."""
    name = engine["head"]
    drafter: dict[str, Any] = {}
    if name == LOOKUP:
        speculation = {
            "method": "ngram_gpu",
            "num_speculative_tokens": K,
            "prompt_lookup_min": SHORTEST_MATCH,
            "prompt_lookup_max": LONGEST_MATCH,
        }
        drafter = {"speculative_config": speculation}
    elif name is not None:
        drafter = {"head": str(EMBEDDED / name), "k": K}  # or a folder elsewhere
    llm = new_engine(
        str(EMBEDDED / "target"),
        **drafter,
        scheduler_cls=RestlessAsyncScheduler if name else AsyncDraftingScheduler,
        worker_cls=WORKER,
        async_scheduling=True,
        max_model_len=160,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        block_size=32,
        num_gpu_blocks_override=7,
        skip_tokenizer_init=False,
    )
    llm.collective_rpc(dummy_step)
    serving = llm.llm_engine
    accept_undrafted(serving.input_processor)
    scheduler = core_of(llm).scheduler
    scheduler._pads = engine["padded"]
    tokens: dict[str, list[int]] = {}
    steps: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    preempt = scheduler._preempt_request

    def watch_preempt(*args: Any, **kwargs: Any) -> Any:
        counts["preempted"] += 1
        return preempt(*args, **kwargs)

    with watched(steps, counts), patch.object(scheduler, "_preempt_request", watch_preempt):
        for request, (prompt, options) in REQUESTS.items():
            serving.add_request(request, prompt, parameters(options))
        while serving.has_unfinished_requests():
            for output in serving.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
            if len(tokens.get("aborted", ())) > 4:
                serving.abort_request(["aborted"])
    recent = scheduler.recorder.recent
    return {
        "texts": tokens,
        "steps": steps,
        "ks": sorted({step.k for step in recent}),
        "seconds": [[step.target_seconds, step.draft_seconds, step.k] for step in recent],
        "left": scheduler.kv_cache_manager.usage,
        **counts,
    }


if __name__ == "__main__":
    main(lambda job: one_by_one(result_of, job["engines"]))
