"""One architecture in the engine that the gateway starts: run as a script.

    python engine_replicas.py JOB RESULT

JOB is {"target": folder, "head": folder to be made, "draft_vocabulary": its size, "speculators":
whether the head has that library's layout, "k": n, "prompts": [[id, ...], ...], "max_tokens": n}.
RESULT gets {"plain": texts without a drafter, "drafted": texts with another K at every step,
"accepted": accepted draft tokens, "offered": verified draft tokens, "report": the worker's report
on its drafter, "groups": layers by KV cache group, "steps": drafts as in engine_drafts.py}. The
engine's arguments are those that the gateway makes from its settings.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the drafter is watched where it runs

import torch
from engine_drafts import RestlessScheduler, Step, watch
from replicas import new_head
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from app.engine.configuration.options import engine_options
from app.settings import load
from drafters.model.checkpoint import save_head
from drafters.model.speculators import save_speculators
from drafters.vllm.v1.runner import V1DraftingRunner

Job = dict[str, Any]


def start(job: Job, *, k: int, max_model_len: int = 160) -> LLM:
    """The gateway's engine for a target and, unless `k` is 0, its head."""
    settings = load(
        {
            "model": job["target"],
            "drafter": job["head"] if k else None,
            "k": k,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": max_model_len,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 256,
            "kv_cache_gib": 0.0625,
        },
        {},
    )
    options = engine_options(settings)
    if k:
        options["additional_config"]["aerie"]["bfloat16_on_cpu"] = False
        options["scheduler_cls"] = RestlessScheduler
    return LLM(**options, skip_tokenizer_init=True)


def write(engine: LLM, job: Job) -> list[list[int]]:
    """Greedy texts, all prompts in one batch."""
    sampling = SamplingParams(
        temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False
    )
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    return [
        list(output.outputs[0].token_ids)
        for output in engine.generate(prompts, sampling, use_tqdm=False)
    ]


def scheduler_of(engine: LLM) -> Any:
    core: Any = engine.llm_engine.engine_core
    return core.engine_core.scheduler


def plain(job: Job) -> dict[str, Any]:
    """The texts without a drafter."""
    return {"plain": write(start(job, k=0), job)}


def drafted(job: Job) -> dict[str, Any]:
    """The texts with drafts, what came of the drafts, and how the engine is laid out; then the
    drafts of steps in which chance accepts, so that several in a row are accepted, too."""
    engine = start(job, k=job["k"])
    scheduler = scheduler_of(engine)
    result: dict[str, Any] = {"offered": 0, "accepted": 0}
    count = scheduler.make_spec_decoding_stats

    def counted(stats: Any, **numbers: Any) -> Any:
        result["offered"] += numbers["num_draft_tokens"]
        result["accepted"] += numbers["num_accepted_tokens"]
        return count(stats, **numbers)

    scheduler.make_spec_decoding_stats = counted
    result["report"] = engine.collective_rpc("aerie_drafter_report")[0]
    result["groups"] = [
        {"layers": group.layer_names, "kind": type(group.kv_cache_spec).__name__}
        for group in scheduler.kv_cache_config.kv_cache_groups
    ]
    result["drafted"] = write(engine, job)
    del scheduler.make_spec_decoding_stats
    steps: list[Step] = []
    watch(V1DraftingRunner, steps)
    write(engine, job)
    return result | {"steps": steps}


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    result = plain(job)
    cleanup_dist_env_and_memory()
    torch.manual_seed(1)
    head = new_head(result["plain"], job["draft_vocabulary"])
    if job["speculators"]:
        save_speculators(head, Path(job["head"]), target=job["target"], draft_tokens=job["k"])
    else:
        save_head(head, Path(job["head"]))
    result |= drafted(job)
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
