"""Swap draft heads under running requests: a script (engines.py), whose job is

    {"model": folder, "head": folder, "prompts": [[id, ...], ...], "max_tokens": n, "runs":
     [{"swaps": {step: folder or ""}, "hole": bool}, ...]}

All prompts of a run are in one batch, at a fixed K. The result has for each run the "texts" by
prompt, the "answers" to its swaps, and "phases": draft tokens that were verified and accepted,
[verified, accepted], before the first swap, between the first and the second, and so on. With
"hole" the head's context begins anew at each swap. Each run begins with the head of the start.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from engines import SCHEDULER, WORKER, core_of, greedy, main, new_engine, swap_head
from vllm import LLM

from drafters.control.objective import FIXED, Objective

K = 5


def swap(engine: LLM, folder: str, *, hole: bool) -> list[dict[str, Any]]:
    """Swap a head in; answers of the engine core."""
    answers = swap_head(engine, folder)
    if hole:
        executor = core_of(engine).model_executor
        contexts = executor.driver_worker.worker.model_runner.own_drafter.contexts
        contexts.context_start[:] = -(-contexts.seen // contexts.block_size) * contexts.block_size
        contexts.whole[:] = False
    return answers


def counts(core: Any) -> list[int]:
    """Draft tokens of the head so far: verified, accepted."""
    head = core.scheduler.speculation("state", {})["totals"]["sources"]["head"]
    return [head["drafted"], head["accepted"]]


def run(llm: LLM, job: dict[str, Any], plan: dict[str, Any], number: int) -> dict[str, Any]:
    """Generate once, with swaps at the steps of the plan."""
    engine, core = llm.llm_engine, core_of(llm)
    swap_head(llm, "")
    core.scheduler.speculation("steer", Objective(FIXED, k=K).entries())
    sampling = greedy(job["max_tokens"])
    for index, prompt in enumerate(job["prompts"]):
        engine.add_request(f"{number}-{index}", {"prompt_token_ids": prompt}, sampling)
    texts: dict[str, list[int]] = {}
    answers, marks, step = [], [counts(core)], 0
    while engine.has_unfinished_requests():
        folder = plan["swaps"].get(str(step))
        if folder is not None:
            marks.append(counts(core))
            answers += swap(llm, folder, hole=plan["hole"])
        for output in engine.step():
            if output.finished:
                texts[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
    marks.append(counts(core))
    return {
        "texts": [texts[f"{number}-{index}"] for index in range(len(job["prompts"]))],
        "answers": answers,
        "phases": [
            [now - then for now, then in zip(later, earlier, strict=True)]
            for earlier, later in pairwise(marks)
        ],
    }


def runs(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Generate in one engine as each plan of the job says."""
    llm = new_engine(
        job["model"],
        job["head"],
        K,
        speculation={"disable_eagle_block_drop": True},
        scheduler_cls=SCHEDULER,
        worker_cls=WORKER,
        async_scheduling=False,
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
        block_size=32,
        kv_cache_memory_bytes=256 << 20,
    )
    return [run(llm, job, plan, number) for number, plan in enumerate(job["runs"])]


if __name__ == "__main__":
    main(runs)
