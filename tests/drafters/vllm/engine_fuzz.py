"""Engines on the same requests, all but one of them disturbed at random: a script (engines.py),
whose job is

    {"target": folder, "heads": {name: folder}, "steps": n, "seed": n, "k_max": n}

The first engine decodes without drafts. The others draft a random K at every step and look up for
some requests, while requests arrive, are aborted, and are preempted for lack of KV cache. The
result has for each head {"finished", "aborted", "preempted", "accepted", "lookups": accepted tokens
of lookups, "passes", "skipped": passes, "ks": {k: steps}, "different": [...]}; an entry of
`different` is a request whose text differs from the first engine's, with the gap in
log-probability, by the first engine, between the two tokens where they differ first.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random
from typing import Any

from engines import WORKER, core_of, generate, main, new_engine, one_by_one
from vllm import SamplingParams

from drafters.config import MAX_K
from drafters.control.policy import Load, Step
from drafters.control.sources.draft_plan import MATCH_CLASSES, DraftPlan, Worth
from drafters.vllm.own_drafter import accept_undrafted
from drafters.vllm.scheduling.scheduler import DraftingScheduler

LOOKUP_K = 14  # more than the head drafts
SHAPE = {
    "max_model_len": 512,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 384,  # less than a prompt may have: prompts are read in parts
    "disable_log_stats": False,
    "enable_prefix_caching": None,  # as vLLM has it
    "worker_cls": WORKER,
}


class RandomK:
    """A policy that chooses blindly at every step; now and then nothing for a stretch."""

    def __init__(self, k_max: int, random: Random) -> None:
        self.k_max = self.k_limit = k_max
        self.max_unobserved_steps = 1
        self.random = random
        self.chosen: Counter[int] = Counter()
        self.accepted = self.lookups = self.skipped = 0
        self.idle = self.k = 0

    def choose(self, load: Load) -> int:
        if self.idle:
            self.idle -= 1
        elif self.random.random() < 0.02:
            self.idle = 30
        k = 0 if self.idle else self.random.randint(0, self.k_max)
        self.chosen[k] += 1
        self.k = k
        return k

    def plan(self) -> DraftPlan | None:
        """One in which each source is the better one for some requests, or no lookups."""
        if self.random.random() < 0.2:
            return None
        lookups = tuple(
            Worth(self.random.randint(1, LOOKUP_K), self.random.random())
            if self.random.random() < 0.7
            else Worth()
            for _ in MATCH_CLASSES
        )
        price = self.random.choice([0.0, 1.0, 3.0, 100.0])
        k, gains = self.random.randint(0, self.k_max), (self.random.random(), self.random.random())
        return DraftPlan(lookups, k, *gains, price, 0.1, self.random.choice([0.0, 0.01]))

    def observe(self, step: Step) -> None:
        assert all(a <= d for a, d in zip(step.accepted, step.drafted, strict=True))
        self.accepted += sum(step.accepted)
        self.lookups += sum(sum(counts.accepted) for counts in step.others)
        self.skipped += step.looked_up > 0 and step.k == 0


class FuzzScheduler(DraftingScheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.k_policy = RandomK(self.k_max, Random(7))


def requests(random: Random, count: int) -> list[dict[str, Any]]:
    """Prompts that share beginnings, and every kind of sampling parameter."""
    stems = [[random.randrange(300, 8000) for _ in range(300)] for _ in range(4)]
    made = []
    for _ in range(count):
        stem = random.choice(stems)[: random.choice([0, 40, 150, 300])]
        prompt = stem + [random.randrange(300, 8000) for _ in range(random.randint(1, 60))]
        options: dict[str, Any] = {
            "max_tokens": random.randint(1, 120), "temperature": 0.0, "ignore_eos": True,
        }  # fmt: skip
        kind = random.randrange(8)
        if kind == 0:
            options["extra_args"] = {MAX_K: random.randint(0, 11)}
        elif kind == 1:
            options |= {"temperature": 0.8, "seed": random.randrange(2**40), "top_p": 0.9}
        elif kind == 2:
            options["logit_bias"] = {random.randrange(300, 8000): 5.0}
        elif kind == 3:
            options |= {"temperature": 1.0, "seed": random.randrange(100), "min_p": 0.1}
        elif kind == 4:
            options |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
        elif kind == 5:  # to the longest length, in few steps
            prompt = stems[0] + prompt[-60:]
            options["max_tokens"] = 512 - len(prompt)
        made.append({"prompt": prompt, "options": options})
    return made


def plain(job: dict[str, Any], asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    engine = new_engine(job["target"], kv_cache_memory_bytes=512 << 20, **SHAPE)
    outputs = generate(
        engine,
        [request["prompt"] for request in asked],
        [SamplingParams(**request["options"], logprobs=5, detokenize=False) for request in asked],
    )
    return [
        {"ids": list(out.outputs[0].token_ids),
         "likely": [{t: e.logprob for t, e in step.items()} for step in out.outputs[0].logprobs]}
        for out in outputs
    ]  # fmt: skip


def disturbed(
    job: dict[str, Any], head: str, asked: list[dict[str, Any]], random: Random
) -> dict[str, Any]:
    """Let requests arrive for the given number of steps, and run until all have ended."""
    llm = new_engine(
        job["target"],
        head,
        LOOKUP_K,
        kv_cache_memory_bytes=24 << 20,  # a third of what 32 requests need
        scheduler_cls=FuzzScheduler,
        additional_config={
            "aerie": {
                "catch_up_tokens": 48, "context_tokens": 256,
                "head_tokens": job["k_max"], "lookup_tokens": LOOKUP_K,
            }
        },
        **SHAPE,
    )  # fmt: skip
    engine, core = llm.llm_engine, core_of(llm)
    accept_undrafted(engine.input_processor)
    finished: dict[int, list[int]] = {}
    running: set[int] = set()
    result: dict[str, Any] = {"aborted": 0, "preempted": 0, "steps": 0}
    waiting = list(range(len(asked)))[::-1]
    preempt = core.scheduler._preempt_request

    def counted(*args: Any, **kwargs: Any) -> Any:
        result["preempted"] += 1
        return preempt(*args, **kwargs)

    core.scheduler._preempt_request = counted
    while running or (waiting and result["steps"] < job["steps"]):
        arriving = random.choice([0, 0, 0, 0, 1, 2, 8])
        while waiting and arriving and len(running) < 48 and result["steps"] < job["steps"]:
            arriving -= 1
            number = waiting.pop()
            options = SamplingParams(**asked[number]["options"], detokenize=False)
            engine.add_request(str(number), {"prompt_token_ids": asked[number]["prompt"]}, options)
            running.add(number)
        if running and random.random() < 0.02:
            number = random.choice(sorted(running))
            engine.abort_request([str(number)])
            running.discard(number)
            result["aborted"] += 1
        for output in engine.step():
            number = int(output.request_id)
            if output.finished and number in running:
                running.discard(number)
                finished[number] = list(output.outputs[0].token_ids)
        result["steps"] += 1
    policy = core.scheduler.k_policy
    drafter = core.model_executor.driver_worker.worker.model_runner.own_drafter
    # What finished in the last step would be told with the next one; nothing else may be left.
    ended = core.scheduler.finished_req_ids
    assert set(drafter.contexts._slots) <= ended
    assert set(drafter.runner.lookup._requests) <= ended
    assert core.scheduler.recorder.untold <= 1
    result |= {
        "texts": finished, "ks": dict(policy.chosen), "accepted": policy.accepted,
        "lookups": policy.lookups, "skipped": policy.skipped,
        "passes": drafter.passes,
    }  # fmt: skip
    return result


def compared(expected: dict[str, Any], ids: list[int]) -> dict[str, Any] | None:
    if ids == expected["ids"]:
        return None
    place = next(
        (i for i, (a, b) in enumerate(zip(ids, expected["ids"], strict=False)) if a != b),
        min(len(ids), len(expected["ids"])),
    )
    if place >= len(ids) or place >= len(expected["ids"]):
        return {"place": place, "gap": None}
    likely = expected["likely"][place]
    known = ids[place] in likely
    gap = abs(likely[expected["ids"][place]] - likely[ids[place]]) if known else None
    return {"place": place, "gap": gap}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Let every engine have the same requests, and compare their texts."""
    asked = requests(Random(job["seed"]), max(24, job["steps"] // 4))
    expected = one_by_one(partial(plain, job), {"plain": asked})["plain"]

    def compared_with_plain(head: str) -> dict[str, Any]:
        result = disturbed(job, head, asked, Random(job["seed"]))
        texts = result.pop("texts")
        differences = {number: compared(expected[number], ids) for number, ids in texts.items()}
        result["finished"] = len(texts)
        result["different"] = [
            {"request": number, "options": asked[number]["options"], **difference}
            for number, difference in differences.items()
            if difference is not None
        ]
        return result

    return one_by_one(compared_with_plain, job["heads"])


if __name__ == "__main__":
    main(run)
