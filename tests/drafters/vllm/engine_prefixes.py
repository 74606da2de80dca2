"""Generate prompts that begin alike, one after the other, and count what the prefix cache has of
each: a script like engine_drafts.py, on vLLM's V1 or V2 model runner. Its job is a JSON file

    {"v2": bool, "turns": [[[id, ...], ...], ...], "tokens": n, "engines": {name: {"model": folder,
     "head": folder or null, "parallel": whether that is a P-EAGLE head}}}

The prompts of a turn are generated together, and behind each prompt of the last turn its answer of
the turn before is added. RESULT has for each engine "cached" tokens and "texts", by prompt in
order, and the number of KV cache "groups".
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
if JOB["v2"]:
    from engine_drafts_v2 import RestlessAsyncScheduler as Scheduler  # before vllm
else:
    from engine_drafts import RestlessScheduler as Scheduler  # type: ignore[assignment]

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

K = 3
BLOCK = 32  # tokens; attention on a CPU takes multiples of it


def generated(engine: dict[str, Any]) -> dict[str, Any]:
    """Start an engine, generate, take it down again."""
    speculation = engine["head"] and {
        "method": "eagle3",
        "model": engine["head"],
        "num_speculative_tokens": K,
        "parallel_drafting": engine["parallel"],
        "disable_eagle_block_drop": True,  # as the gateway sets it
    }
    llm = LLM(
        model=engine["model"],
        speculative_config=speculation or None,
        scheduler_cls=Scheduler if speculation else None,
        worker_cls="drafters.vllm.worker.DraftingWorker",
        async_scheduling=JOB["v2"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=BLOCK,
        kv_cache_memory_bytes=64 << 20,
        skip_tokenizer_init=True,
        # vLLM leaves it out beside some heads unless told.
        enable_prefix_caching=True,
    )
    cached: list[int] = []
    texts: list[list[int]] = []
    for number, turn in enumerate(JOB["turns"]):
        following = len(JOB["turns"]) - 1 - number
        if not following:
            before = texts[-len(turn) :]
            turn = [prompt + text for prompt, text in zip(turn, before, strict=True)]
        # Only answers that the last turn goes on from are looked up in the cache.
        tokens = JOB["tokens"] if following == 1 else 4
        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in turn], sampling)
        cached += [output.num_cached_tokens or 0 for output in outputs]
        texts += [list(output.outputs[0].token_ids) for output in outputs]
    groups = len(llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups)
    del llm
    cleanup_dist_env_and_memory()
    return {"cached": cached, "texts": texts, "groups": groups}


def main() -> None:
    result = {name: generated(engine) for name, engine in JOB["engines"].items()}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
