"""Swap draft heads in running engines, and record what is drafted: a script like engine_drafts.py.

JOB is {"v2": bool, "prompts": [[id, ...], ...], "max_tokens": n, "engines": {name: {"model":
folder, "head": folder, "parallel": bool, "graphs": bool, "swaps": [folder or "", ...]}}}. RESULT
has for each engine an entry for the head of its start and for each swap in order: {"answers": what
`stage` and `swap` said, "steps": as engine_drafts.py records them, of prompts that began with this
head}.
"""

# ruff: noqa: E402
# What decides how Triton and vLLM load comes first.
from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

JOB: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
V2: bool = JOB["v2"]
if V2:
    import engine_drafts_v2 as v2  # before vllm
from contextlib import nullcontext

from engine_drafts import RestlessScheduler, watch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from drafters.config import captured_table
from drafters.vllm.v1.runner import V1DraftingRunner

K = 4


def swapped(engine: dict[str, Any]) -> list[dict[str, Any]]:
    """Start an engine, and generate with each head in turn."""
    speculation = {
        "method": "eagle3",
        "model": engine["head"],
        "num_speculative_tokens": K,
        "parallel_drafting": engine["parallel"],
    }
    if V2:
        speculation["num_speculative_tokens_per_batch_size"] = captured_table(K)
    llm = LLM(
        model=engine["model"],
        speculative_config=speculation,
        additional_config={"aerie": {"bfloat16_on_cpu": False}},
        scheduler_cls=v2.RestlessAsyncScheduler if V2 else RestlessScheduler,
        worker_cls="drafters.vllm.worker.DraftingWorker",
        async_scheduling=V2,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=2 if V2 else 4,
        max_num_batched_tokens=256,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    core: Any = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    sampling = SamplingParams(
        temperature=0, max_tokens=JOB["max_tokens"], ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in JOB["prompts"]]
    steps: list[dict[str, Any]] = []
    if V2:
        llm.collective_rpc(v2.warm_up)
        if engine["graphs"]:
            llm.collective_rpc(v2.record)
    else:
        watch(V1DraftingRunner, steps)
    result = []
    for folder in (None, *engine["swaps"]):
        answers = []
        if folder is not None:
            answers = [core.aerie_head(command, folder) for command in ("stage", "swap")]
        steps.clear()
        with v2.watched(steps, range(0)) if V2 else nullcontext():
            llm.generate(prompts, sampling, use_tqdm=False)
        result.append({"answers": answers, "steps": list(steps)})
    del llm, core
    cleanup_dist_env_and_memory()
    return result


def main() -> None:
    result = {name: swapped(engine) for name, engine in JOB["engines"].items()}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
