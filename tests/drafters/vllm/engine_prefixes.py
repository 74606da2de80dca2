"""Generate prompts that begin alike, one after the other, and count what the prefix cache has of
each: a script (engines.py) on vLLM's V1 or V2 model runner. Its job is

    {"v2": bool, "block": tokens of a block, "turns": [[[id, ...], ...], ...], "tokens": n,
     "engines": {name: {"model": folder, "head": folder or null}}}

The prompts of a turn are generated together, and behind each prompt of the last turn its answer of
the turn before is added. The result has for each engine "cached" tokens and "texts", by prompt in
order, and the number of KV cache "groups".
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

# What decides how Triton and vLLM load comes first.
if json.loads(Path(sys.argv[1]).read_text())["v2"]:
    from engine_drafts_v2 import RestlessAsyncScheduler as Scheduler  # before vllm
else:
    from engine_drafts import RestlessScheduler as Scheduler  # type: ignore[assignment]

from engines import WORKER, core_of, generate, greedy, main, new_engine, one_by_one, texts

K = 3


def generated(job: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    """Start an engine, and generate each turn."""
    llm = new_engine(
        **engine,
        k=K,
        speculation={"disable_eagle_block_drop": True},  # as the gateway sets it
        scheduler_cls=Scheduler if engine["head"] else None,
        worker_cls=WORKER,
        async_scheduling=job["v2"],
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=job["block"],
        # vLLM leaves it out beside some heads unless told.
        enable_prefix_caching=True,
    )
    cached: list[int] = []
    answers: list[list[int]] = []
    for number, turn in enumerate(job["turns"]):
        following = len(job["turns"]) - 1 - number
        if not following:
            before = answers[-len(turn) :]
            turn = [prompt + text for prompt, text in zip(turn, before, strict=True)]
        # Only answers that the last turn goes on from are looked up in the cache.
        outputs = generate(llm, turn, greedy(job["tokens"] if following == 1 else 4))
        cached += [output.num_cached_tokens or 0 for output in outputs]
        answers += texts(outputs)
    groups = len(core_of(llm).scheduler.kv_cache_config.kv_cache_groups)
    return {"cached": cached, "texts": answers, "groups": groups}


if __name__ == "__main__":
    main(lambda job: one_by_one(partial(generated, job), job["engines"]))
