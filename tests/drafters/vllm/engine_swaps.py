"""Swap draft heads in running engines, and record what is drafted: a script like engine_drafts.py.

JOB is {"prompts": [[id, ...], ...], "max_tokens": n, "engines": {name: {"model": folder, "head":
folder, "parallel": bool, "eager": bool, "swaps": [folder or "", ...]}}}. RESULT has for each engine
an entry for the head of its start and for each swap in order: {"answers": what `stage` and `swap`
said, "steps": as engine_drafts.py records them, of prompts that began with this head}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from engine_drafts import RestlessScheduler, watch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from drafters.vllm.v1.runner import V1DraftingRunner

K = 4


def swapped(job: dict[str, Any], engine: dict[str, Any]) -> list[dict[str, Any]]:
    """Start an engine, and generate with each head in turn."""
    speculation = {
        "method": "eagle3",
        "model": engine["head"],
        "num_speculative_tokens": K,
        "parallel_drafting": engine["parallel"],
    }
    llm = LLM(
        model=engine["model"],
        speculative_config=speculation,
        additional_config={"aerie": {"bfloat16_on_cpu": False}},
        scheduler_cls=RestlessScheduler,
        worker_cls="drafters.vllm.worker.DraftingWorker",
        async_scheduling=False,
        dtype="float32",
        enforce_eager=engine["eager"],
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    core: Any = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    sampling = SamplingParams(
        temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    steps: list[dict[str, Any]] = []
    watch(V1DraftingRunner, steps)
    result = []
    for folder in (None, *engine["swaps"]):
        answers = []
        if folder is not None:
            answers = [core.aerie_head(command, folder) for command in ("stage", "swap")]
        steps.clear()
        llm.generate(prompts, sampling, use_tqdm=False)
        result.append({"answers": answers, "steps": list(steps)})
    del llm, core
    cleanup_dist_env_and_memory()
    return result


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    result = {name: swapped(job, engine) for name, engine in job["engines"].items()}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
