"""Count the texts that engines sample, many times over: a script (engines.py), whose job is

    {"target": folder, "heads": {name: folder}, "prompt": [id, ...], "tokens": n, "k_max": n,
     "kinds": {name: {"count": n, "options": sampling parameters}}}

All requests run mixed with each other: with another K at every step, from 0 to k_max, and with
lookups too, in the place of the head where there is a match or beside it. The result has for each
head {"changing" | "lookups": {"accepted": n, "looked_up": n, "counts": {name: {"t,t,t": n}}}}: how
often each text was sampled, and accepted drafts of head and lookups.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random
from typing import Any

from engines import SCHEDULER, WORKER, core_of, generate, main, new_engine, one_by_one, texts
from vllm import LLM, SamplingParams

from bench.simulate.fixed import Fixed
from drafters.control.policy import Load, Step
from drafters.control.sources.draft_plan import MATCH_CLASSES, DraftPlan, Worth
from drafters.vllm.own_drafter import accept_undrafted


class Counting(Fixed):
    """Fixed K, or any, with lookups or without."""

    def __init__(self, k_max: int, random: Random | None, lookups: bool) -> None:
        super().__init__(k_max, k_max)
        self.random, self.lookups = random, lookups
        self.accepted = self.looked_up = 0

    def choose(self, load: Load) -> int:
        return self.k if self.random is None else self.random.randint(0, self.k_max)

    def plan(self) -> DraftPlan | None:
        if not self.lookups or self.random is None:
            return None
        worth = [Worth(self.random.randint(1, self.k_max), self.random.random()) for _ in "ab"]
        lookups = tuple(self.random.choice([Worth(), *worth]) for _ in MATCH_CLASSES)
        return DraftPlan(lookups, self.k_max, self.random.random(), self.random.random())

    def observe(self, step: Step) -> None:
        self.accepted += sum(step.accepted)
        self.looked_up += sum(sum(counts.accepted) for counts in step.others)


def parameters(options: dict[str, Any]) -> dict[str, Any]:
    """JSON has no integer keys."""
    bias = options.get("logit_bias")
    return {**options, "logit_bias": bias and {int(token): by for token, by in bias.items()}}


def sampling_engine(job: dict[str, Any], head: str, **options: Any) -> LLM:
    """An engine with a head of the job, and other options of vLLM than for the V1 model runner."""
    shape = {
        "scheduler_cls": SCHEDULER,
        "max_num_seqs": 256,
        "max_model_len": 64,
        "max_num_batched_tokens": 4096,
        "seed": 5,
        "worker_cls": WORKER,
        "additional_config": {"aerie": {"lookup_tokens": job["k_max"]}},
    }
    engine = new_engine(job["target"], head, job["k_max"], **{**shape, **options})
    accept_undrafted(engine.llm_engine.input_processor)
    return engine


def count_texts(engine: LLM, job: dict[str, Any], policy: Counting) -> dict[str, Any]:
    """Sample all that the job asks for under a policy."""
    asked = [
        (
            kind,
            SamplingParams(max_tokens=job["tokens"], ignore_eos=True, detokenize=False, **options),
        )
        for kind, entry in job["kinds"].items()
        for options in [parameters(entry["options"])]
        for _ in range(entry["count"])
    ]
    Random(1).shuffle(asked)
    core_of(engine).scheduler.k_policy = policy
    outputs = generate(engine, [job["prompt"]] * len(asked), [params for _, params in asked])
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in job["kinds"]}
    for (kind, _), text in zip(asked, texts(outputs), strict=True):
        counts[kind][",".join(map(str, text))] += 1
    return {"accepted": policy.accepted, "looked_up": policy.looked_up, "counts": counts}


def sampled(job: dict[str, Any], head: str) -> dict[str, Any]:
    """Start an engine, and sample with and without lookups."""
    engine = sampling_engine(job, head)
    result: dict[str, Any] = {}
    for name, seed in (("changing", 2), ("lookups", 3)):
        policy = Counting(job["k_max"], Random(seed), name == "lookups")
        result[name] = count_texts(engine, job, policy)
    return result


if __name__ == "__main__":
    main(lambda job: one_by_one(partial(sampled, job), job["heads"]))
