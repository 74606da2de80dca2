"""Acceptance of heads by vLLM's own counters: a script that runs one engine after the other.

    python engine_acceptance.py JOB RESULT

JOB is a JSON file {"target": folder, "heads": {name: folder}, "prompts": [[id, ...], ...],
"max_tokens": n, "k": K}. RESULT gets {name: {"drafts": n, "accepted": [n, ...]}}, accepted
tokens by position.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # a second process would only cost a start

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory


def counters(engine: LLM) -> dict[str, Any]:
    values = {metric.name: metric for metric in engine.get_metrics()}
    return {
        "drafts": values["vllm:spec_decode_num_drafts"].value,
        "accepted": values["vllm:spec_decode_num_accepted_tokens_per_pos"].values,
    }


def measured(job: dict[str, Any], head: str) -> dict[str, Any]:
    """Start an engine, answer the prompts greedily, take it down again."""
    engine = LLM(
        model=job["target"],
        speculative_config={
            "method": "eagle3",
            "model": head,
            "num_speculative_tokens": job["k"],
            "parallel_drafting": True,
        },
        worker_cls="drafters.vllm.worker.DraftingWorker",
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=False,
    )
    before = counters(engine)
    sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"])
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    engine.generate(prompts, sampling, use_tqdm=False)
    after = counters(engine)
    del engine
    cleanup_dist_env_and_memory()
    return {
        "drafts": after["drafts"] - before["drafts"],
        "accepted": [
            new - old for new, old in zip(after["accepted"], before["accepted"], strict=True)
        ],
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    result = {name: measured(job, folder) for name, folder in job["heads"].items()}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
