"""Windows of every policy in turn, at every load that the journal lacks."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.load.run import measure
from bench.sweep.cells import Work, takes_ignore_eos
from bench.sweep.fleet import Fleet, Report
from bench.sweep.journal import Journal
from bench.sweep.switchback import Users, run_turn
from bench.systems.method import Method, parse
from bench.trace.stages import limits, stages
from bench.workloads.load import load_prompts

PROMPTS = 1024  # of a workload that windows draw from
START_S = 120.0  # of a gateway with the default model, half of it where nothing is compiled anew
SWITCH_S = 0.2  # a PATCH and two pages of metrics
TOKENS_PER_SECOND = 150.0  # of a moving load, on two cores: for the estimate alone

Key = tuple[str, str, str, int]  # method, workload, load, round


@dataclass(frozen=True)
class Plan:
    """What is measured; two starts with equal plans go on in one file."""

    methods: str
    workloads: tuple[str, ...]
    loads: tuple[str, ...]  # users, or the name of a moving load
    rounds: int
    seconds: float  # of a window
    settle: float  # before it, not counted
    requests: int  # of each stage of a moving load
    max_tokens: int
    spread: float
    seed: int
    settings: dict[str, Any]

    def entry(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def windows(self) -> Iterator[Key]:
        """Every window, in the order of running: a round of one load is done before the next load,
        and all loads have had a round before any has two, so that a run may end at any time."""
        methods = parse(self.methods)
        for number in range(self.rounds):
            for workload in self.workloads:
                for load in self.loads:
                    for method in self.order(methods, workload, load, number):
                        yield method.name, workload, load, number

    def order(
        self, methods: Sequence[Method], workload: str, load: str, number: int
    ) -> list[Method]:
        """Of one round: in another order than the one before."""
        order = list(methods)
        random.Random(f"{self.seed}:{workload}:{load}:{number}").shuffle(order)
        return order

    def seconds_left(self, journal: Journal) -> float:
        """About, of what the journal lacks, the start of the engine included."""
        left = [key for key in self.windows() if key not in journal.cells]
        fills = {key[1:] for key in left if key[2].isdigit()}
        windows = sum(self._seconds(load) for _, _, load, _ in left) + self.settle * len(fills)
        return (START_S if left else 0.0) + windows

    def _seconds(self, load: str) -> float:
        if load.isdigit():
            return self.seconds + self.settle + SWITCH_S
        tokens = self.max_tokens * len(limits(stages(load, self.requests)))
        return SWITCH_S + self.settle + tokens / TOKENS_PER_SECOND


async def ablate(plan: Plan, journal: Journal, fleet: Fleet, report: Report) -> None:
    """Run what is missing. Raises RuntimeError where the server fails."""
    methods = {method.name: method for method in parse(plan.methods)}
    works: dict[str, Work] = {}
    for number in range(plan.rounds):
        for workload in plan.workloads:
            for load in plan.loads:
                order = plan.order(list(methods.values()), workload, load, number)
                place = workload, load, number
                missing = [m for m in order if (m.name, *place) not in journal.cells]
                if not missing:
                    continue
                if workload not in works:
                    works[workload] = await _work(plan, fleet, workload, missing[0])
                began = time.monotonic()
                if load.isdigit():
                    await _windows(plan, journal, fleet, works[workload], missing, place)
                else:
                    await _traces(plan, journal, fleet, works[workload], missing, place)
                left = plan.seconds_left(journal) - START_S
                report(
                    f"{workload}, {load}, round {number}: {len(missing)} windows in "
                    f"{time.monotonic() - began:.0f} s, about {max(0.0, left) / 60:.0f} min left"
                )


async def _work(plan: Plan, fleet: Fleet, workload: str, method: Method) -> Work:
    prompts = load_prompts(workload, PROMPTS, chat=False, seed=plan.seed)
    work = Work(prompts, fleet.model, plan.max_tokens, ignore_eos=True, spread=plan.spread)
    client = await fleet.switch(method)
    return replace(work, ignore_eos=await takes_ignore_eos(client, work))


async def _windows(
    plan: Plan, journal: Journal, fleet: Fleet, work: Work, methods: Sequence[Method],
    place: tuple[str, str, int],
) -> None:  # fmt: skip
    """Users who go on asking while policies take turns; each window the same prompts."""
    client = await fleet.switch(methods[0])
    async with Users(client, work, int(place[1])) as users:
        await asyncio.sleep(plan.settle)  # the batch fills
        for method in methods:
            await fleet.switch(method)
            users.begin(place[2] * PROMPTS // plan.rounds)
            found = await run_turn(client, users, plan.seconds, plan.settle)
            journal.add((method.name, *place), found)


async def _traces(
    plan: Plan, journal: Journal, fleet: Fleet, work: Work, methods: Sequence[Method],
    place: tuple[str, str, int],
) -> None:  # fmt: skip
    """The same requests of a moving load for each policy."""
    trace = limits(stages(place[1], plan.requests))
    for method in methods:
        client = await fleet.switch(method)
        jobs = work.jobs(place[2] * len(trace), len(trace))
        warm_up = work.jobs(place[2] * len(trace) + len(trace), 2)
        await measure(client, warm_up, limits=[1, 1])
        found = await measure(client, jobs, limits=trace)
        journal.add((method.name, *place), found)
        if found["failed"]:
            why = found["failures"][0]
            raise RuntimeError(f"{method.name}: {found['failed']} requests failed: {why}")
