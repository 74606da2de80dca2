"""One architecture in the engine that the gateway starts: a script (engines.py), whose job is

    {"target": folder, "head": folder or null, "k": n, "prompts": [[id, ...], ...], "max_tokens": n}

The engine's arguments are those that the gateway makes from its settings. The result has "texts",
and with a head, which has another K at every step, {"accepted": accepted draft tokens, "offered":
verified draft tokens, "report": the worker's report on its drafter, "groups": layers by KV cache
group, "steps": drafts as in engine_drafts.py}.
"""

from __future__ import annotations

from typing import Any

from engine_drafts import RestlessScheduler, Step, watch
from engines import core_of, generate, greedy, main, texts
from vllm import LLM

from app.engine.configuration.options import engine_options
from app.settings import load
from drafters.vllm.v1.runner import V1DraftingRunner


def start(job: dict[str, Any]) -> LLM:
    """The gateway's engine for a target and its head, if it has one."""
    settings = load(
        {
            "model": job["target"],
            "drafter": job["head"],
            "k": job["k"],
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 160,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 256,
            "kv_cache_gib": 0.0625,
        },
        {},
    )
    options = engine_options(settings)
    if job["head"]:
        options["additional_config"]["aerie"]["bfloat16_on_cpu"] = False
        options["scheduler_cls"] = RestlessScheduler
    return LLM(**options, skip_tokenizer_init=True)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The texts; with drafts also what came of them, and how the engine is laid out. Then the
    drafts of steps in which chance accepts, so that several in a row are accepted, too."""
    engine = start(job)

    def write() -> list[list[int]]:
        return texts(generate(engine, job["prompts"], greedy(job["max_tokens"])))

    if not job["head"]:
        return {"texts": write()}
    scheduler = core_of(engine).scheduler
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
    result["texts"] = write()
    del scheduler.make_spec_decoding_stats
    steps: list[Step] = []
    watch(V1DraftingRunner, steps)
    write()
    return result | {"steps": steps}


if __name__ == "__main__":
    main(run)
