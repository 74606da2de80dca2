"""Does acceptance come back after a long time without drafts? A script (engines.py), whose job is

    {"target": folder, "heads": {name: folder}, "prompts": [[id, ...], ...], "steps": n,
     "seconds": n, "k": n, "load": n, "catch_up_tokens": n}

With each head, a few requests decode with K = k. Then `load` requests run at K = 0, for so many
steps and for at least these seconds. Then the load ends, except for requests that began in it, and
four new ones come, with K = k again. Greedy text does not depend on K, so afterwards the same texts
are generated with K = k throughout, whose acceptance over the same tokens is the level to return
to. The result has for each head {"tokens_without": {request: n}, "before" | "old" | "met it" |
"new": {"requests": n, "steps": n, "length": acceptance length, "undisturbed": acceptance length}}.
"""

from __future__ import annotations

import time
from collections import defaultdict
from functools import partial
from typing import Any

from engines import SCHEDULER, WORKER, core_of, greedy, main, new_engine, one_by_one

from bench.simulate.fixed import Fixed

LONGEST = 2048
FEW = 4
BEFORE = 60  # tokens that each of the few has before the load comes
AFTER = 160  # and that each is given after it


class Run:
    """One engine; the accepted drafts of every request by the place in its output."""

    def __init__(self, job: dict[str, Any], head: str) -> None:
        engine = new_engine(
            job["target"],
            head,
            job["k"],
            additional_config={"aerie": {"catch_up_tokens": job["catch_up_tokens"]}},
            scheduler_cls=SCHEDULER,
            worker_cls=WORKER,
            max_model_len=LONGEST,
            max_num_seqs=64,
            block_size=job["catch_up_tokens"] // 2,  # 128 for 256, as in service
            kv_cache_memory_bytes=1 << 30,
        )
        self.engine, self.scheduler = engine.llm_engine, core_of(engine).scheduler
        self.lengths: dict[str, int] = {}
        self.accepted: dict[str, dict[int, int]] = defaultdict(dict)
        self.texts: dict[str, list[int]] = {}
        tally = self.scheduler.make_spec_decoding_stats

        def watched(stats: Any, **counts: Any) -> Any:
            name = counts["request_id"].split("-")[0]
            place = self.scheduler.requests[counts["request_id"]].num_output_tokens
            self.accepted[name][place] = counts["num_accepted_tokens"]
            return tally(stats, **counts)

        self.scheduler.make_spec_decoding_stats = watched

    def hold(self, k: int) -> None:
        self.scheduler.k_policy = Fixed(k, self.scheduler.num_spec_tokens)

    def add(self, name: str, prompt: list[int], tokens: int) -> None:
        self.engine.add_request(name, {"prompt_token_ids": prompt}, greedy(tokens))
        self.lengths[name] = 0

    def step(self) -> None:
        for output in self.engine.step():
            self.texts[output.request_id] = list(output.outputs[0].token_ids)
            self.lengths[output.request_id] = len(self.texts[output.request_id])
            if output.finished:
                del self.lengths[output.request_id]

    def drop(self, names: list[str]) -> None:
        self.engine.abort_request(names)
        for name in names:
            del self.lengths[name]

    def length(self, spans: dict[str, tuple[int, int]]) -> tuple[int, float]:
        """(steps, acceptance length) of drafts verified at places of the spans."""
        counts = [
            accepted
            for name, (start, end) in spans.items()
            for place, accepted in self.accepted[name].items()
            if start <= place < end
        ]
        return len(counts), 1 + sum(counts) / max(1, len(counts))


def backed_off(job: dict[str, Any], head: str) -> dict[str, Any]:
    """What is accepted before and after a back-off, and without one."""
    run = Run(job, head)
    prompts = {f"p{number}": prompt for number, prompt in enumerate(job["prompts"])}
    names = iter(prompts)

    def begin(count: int, tokens: int | None = None) -> list[str]:
        chosen = [next(names) for _ in range(count)]
        for name in chosen:
            run.add(name, prompts[name], tokens or LONGEST - len(prompts[name]) - 1)
        return chosen

    run.hold(job["k"])
    old = begin(FEW)
    while min(run.lengths[name] for name in old) < BEFORE:
        run.step()
    left_at = {name: run.lengths[name] for name in old}
    run.hold(0)
    steps, ends = 0, time.monotonic() + job["seconds"]
    met: list[str] = []
    room = LONGEST - 150 - AFTER
    while steps < job["steps"] or time.monotonic() < ends:
        if max(run.lengths[name] for name in old) >= room:
            break
        steps += 1
        if len(run.lengths) < job["load"]:
            met += begin(1)
        run.step()
        for name in [name for name in met if run.lengths.get(name, 0) > room]:
            run.drop([name])
            met.remove(name)
    back_at = {name: run.lengths[name] for name in (*old, *met)}
    stayed = sorted(met, key=back_at.__getitem__)[-FEW:]
    run.drop([name for name in met if name not in stayed])
    run.hold(job["k"])
    new = begin(FEW)
    watched = [*old, *stayed, *new]
    # One that is at its end has had more than that: it was drafted for best.
    while min(run.lengths.get(n, LONGEST) - back_at.get(n, 0) for n in watched) < AFTER:
        run.step()
    spans = {
        "before": {name: (0, left_at[name]) for name in old},
        "old": {name: (back_at[name], back_at[name] + AFTER) for name in old},
        "met it": {name: (back_at[name], back_at[name] + AFTER) for name in stayed},
        "new": dict.fromkeys(new, (0, AFTER)),
    }
    found = {group: run.length(places) for group, places in spans.items()}
    run.drop(list(run.lengths))
    run.step()
    texts = dict(run.texts)

    run.accepted.clear()
    run.texts.clear()
    for name in watched:
        run.add(name + "-again", prompts[name], len(texts[name]))
    while run.lengths:
        run.step()
    assert all(run.texts[name + "-again"] == texts[name] for name in watched)
    result: dict[str, Any] = {
        "tokens_without": {name: back_at[name] - left_at.get(name, 0) for name in back_at}
    }
    for group, places in spans.items():
        steps, length = found[group]
        result[group] = {
            "requests": len(places), "steps": steps, "length": length,
            "undisturbed": run.length(places)[1],
        }  # fmt: skip
    return result


if __name__ == "__main__":
    main(lambda job: one_by_one(partial(backed_off, job), job["heads"]))
