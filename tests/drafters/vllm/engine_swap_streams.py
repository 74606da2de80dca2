"""Swap draft heads under running requests: a script like engine_drafts.py.

JOB is {"model": folder, "head": folder, "prompts": [[id, ...], ...], "max_tokens": n, "runs":
[{"swaps": {step: folder or ""}, "hole": bool}, ...]}. All prompts of a run are in one batch, at a
fixed K. RESULT has for each run the "texts" by prompt, the "answers" to its swaps, and "phases":
draft tokens that were verified and accepted, [verified, accepted], before the first swap, between
the first and the second, and so on. With "hole" the head's context begins anew at each swap. Each
run begins with the head of the start.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams

from drafters.control.objective import FIXED, Objective

K = 5
HEAD = "drafters.vllm.scheduling.scheduler.DraftingScheduler"


def swap(core: Any, folder: str, *, hole: bool) -> list[dict[str, Any]]:
    """Swap a head in; answers of the engine core."""
    answers = [core.aerie_head(command, folder) for command in ("stage", "swap")]
    if hole:
        contexts = core.model_executor.driver_worker.worker.model_runner.own_drafter.contexts
        contexts.first[:] = -(-contexts.seen // contexts.block_size) * contexts.block_size
        contexts.whole[:] = False
    return answers


def counts(core: Any) -> list[int]:
    """Draft tokens of the head so far: verified, accepted."""
    head = core.scheduler.speculation("state", {})["totals"]["sources"]["head"]
    return [head["drafted"], head["accepted"]]


def run(llm: LLM, job: dict[str, Any], plan: dict[str, Any], number: int) -> dict[str, Any]:
    """Generate once, with swaps at the steps of the plan."""
    engine: Any = llm.llm_engine
    core = engine.engine_core.engine_core
    swap(core, "", hole=False)
    core.scheduler.speculation("steer", Objective(FIXED, k=K).entries())
    sampling = SamplingParams(
        temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False
    )
    for index, prompt in enumerate(job["prompts"]):
        engine.add_request(f"{number}-{index}", {"prompt_token_ids": prompt}, sampling)
    texts: dict[str, list[int]] = {}
    answers, marks, step = [], [counts(core)], 0
    while engine.has_unfinished_requests():
        folder = plan["swaps"].get(str(step))
        if folder is not None:
            marks.append(counts(core))
            answers += swap(core, folder, hole=plan["hole"])
        for output in engine.step():
            if output.finished:
                texts[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
    marks.append(counts(core))
    return {
        "texts": [texts[f"{number}-{index}"] for index in range(len(job["prompts"]))],
        "answers": answers,
        "steps": step,
        "phases": [
            [now - then for now, then in zip(later, earlier, strict=True)]
            for earlier, later in pairwise(marks)
        ],
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(
        model=job["model"],
        speculative_config={
            "method": "eagle3",
            "model": job["head"],
            "num_speculative_tokens": K,
            "parallel_drafting": True,
            "disable_eagle_block_drop": True,
        },
        scheduler_cls=HEAD,
        worker_cls="drafters.vllm.worker.DraftingWorker",
        async_scheduling=False,
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        block_size=32,
        kv_cache_memory_bytes=256 << 20,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    result = [run(llm, job, plan, number) for number, plan in enumerate(job["runs"])]
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
