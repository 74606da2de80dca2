"""As engine_samples.py, on vLLM's V2 model runner in Triton's interpreter, with another K at every
step. A job also has "ways", and "texts", requests of which each has a seed or is greedy:

    {"prompts": [[id, ...], ...], "tokens": n, "options": [sampling parameters, ...]}

They are generated in the ways of the job: at K = 0 ("none"), at another K at every step
("changing"), a few at a time at the largest K ("drawn"), and at that K with the head's most
probable drafts ("most probable"). The result has for each head {"texts": {way: [[id, ...], ...]},
"steps": {way: [requests' steps with drafts, drafts accepted of them]}}.
"""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from engine_drafts_v2 import AsyncDraftingScheduler  # before vllm: it chooses the interpreter
from engine_samples import Counting, sampling_engine
from engines import core_of, generate, main, one_by_one, texts
from vllm import LLM, SamplingParams

from drafters.control.policy import Step


class Measuring(Counting):
    """Counts the steps of requests that verified drafts too."""

    steps = 0

    def observe(self, step: Step) -> None:
        super().observe(step)
        self.steps += sum(step.drafted[:1])


def set_drawing(worker: Any, drawing: bool) -> None:
    """Let the speculator draw drafts, or keep it from that."""
    speculator = worker.model_runner.own_speculator
    if not hasattr(worker, "sampling"):
        worker.sampling = speculator.sampling
    speculator.sampling = worker.sampling if drawing else None


def texts_of(engine: LLM, job: dict[str, Any], policy: Measuring, batch: int) -> list[list[int]]:
    """The text of each request, in batches of at most `batch`."""
    core_of(engine).scheduler.k_policy = policy
    prompts = [prompt for prompt in job["prompts"] for _ in job["options"]]
    sampling = [
        SamplingParams(
            max_tokens=job["tokens"], ignore_eos=True, detokenize=False,
            **({"seed": number} if options["temperature"] else {}), **options,
        )
        for number, _ in enumerate(job["prompts"])
        for options in job["options"]
    ]  # fmt: skip
    made: list[list[int]] = []
    for begin in range(0, len(prompts), batch):
        some = slice(begin, begin + batch)
        made += texts(generate(engine, prompts[some], sampling[some]))
    return made


def sampled(job: dict[str, Any], head: str) -> dict[str, Any]:
    """Start an engine, and generate in each way."""
    engine = sampling_engine(
        job, head, scheduler_cls=AsyncDraftingScheduler, async_scheduling=True, max_num_seqs=128
    )
    result: dict[str, Any] = {"texts": {}, "steps": {}}
    for way in job["ways"]:
        policy = Measuring(job["k_max"], Random(2) if way == "changing" else None, lookups=False)
        if way == "none":
            policy.k = 0
        engine.collective_rpc(set_drawing, args=(way != "most probable",))
        batch = 5 if way == "drawn" else 128
        result["texts"][way] = texts_of(engine, job["texts"], policy, batch)
        result["steps"][way] = [policy.steps, policy.accepted]
    return result


if __name__ == "__main__":
    main(lambda job: one_by_one(partial(sampled, job), job["heads"]))
