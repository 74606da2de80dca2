"""Run a sweep: every cell that its journal does not have yet, in interleaved rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from bench.load.client import Client
from bench.load.intervals import Mean, of_equal_time, of_equal_work
from bench.load.run import measure
from bench.sweep.cells import Work, hopeless, requests_for, rounds, run_cell, takes_ignore_eos
from bench.sweep.fleet import Fleet, Report
from bench.sweep.journal import Journal
from bench.sweep.switchback import TURN_SETTLE_S, Users, run_turn
from bench.systems.method import Method, parse, servers
from bench.workloads.load import load_prompts

PROMPTS = 1024  # number of different prompts of a sweep


@dataclass(frozen=True)
class Plan:
    """What is measured. A second start with an equal plan continues in the same file."""

    workload: str
    chat: bool
    methods: str
    concurrencies: tuple[int, ...]
    rounds: int
    max_tokens: int
    seconds: float  # about how long a cell takes; its requests are set once, for all methods
    requests: int | None  # requests of a cell per user, instead of `seconds`
    seed: int
    together: bool  # all servers run at once, with rounds over all; else one after the other
    settings: dict[str, Any]  # of the engines
    model_free: str = ""  # architecture without weights
    spread: float = 0.0  # of the answers' lengths, as a share of max_tokens
    switchback: bool = False  # turns of `seconds` under one load, for methods of one gateway
    settle: float = TURN_SETTLE_S  # seconds at the beginning of a turn that do not count
    constraint: str = ""  # of the answers (bench/workloads/constraints.py)
    context: int = 0  # tokens of source code before each prompt, about
    cached_prompts: bool = False  # the prefix cache has the prompts of all cells
    temperature: float = 0.0  # of every request; 0 is greedy
    stop_at_eos: bool = False  # answers end where the model ends them
    drop_below: float = 0.0  # a K below this share of the fastest runs only in `first_rounds`
    eagle3: str = ""  # the EAGLE-3 head; "" is the default model's
    attached: dict[str, str] = field(default_factory=dict)  # addresses, by server
    environment: dict[str, str] = field(default_factory=dict)  # settings of the engines in it

    @property
    def first_rounds(self) -> int:
        """Rounds that every method runs in; a sixth, as one of many short turns says little."""
        return max(1, self.rounds // 6)

    @property
    def mean(self) -> Mean:
        """The mean over a method's rounds that gives its tokens per second."""
        return of_equal_time if self.switchback else of_equal_work

    def entry(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return asdict(self)


def plan_of(journal: Journal) -> Plan:
    """The plan of the results in a file. Raises JournalError if they are not those of a Plan."""
    entry = journal.recorded_plan()
    try:
        return Plan(**{**entry, "concurrencies": tuple(entry["concurrencies"])})
    except (KeyError, TypeError):
        raise journal.of_another_command() from None


async def sweep(plan: Plan, journal: Journal, fleet: Fleet, report: Report) -> None:
    """Run the cells that are missing. Raises RuntimeError if a server or a request fails."""
    prompts = load_prompts(
        plan.workload,
        PROMPTS,
        chat=plan.chat,
        seed=plan.seed,
        context=plan.context,
        constraint=plan.constraint,
    )
    methods = parse(plan.methods)
    work = Work(
        prompts,
        fleet.model,
        plan.max_tokens,
        ignore_eos=not plan.stop_at_eos,
        spread=plan.spread,
        fields={"temperature": plan.temperature},
    )
    works: dict[str, Work] = {}  # by server, as it takes them
    groups = [methods] if plan.together else list(servers(methods).values())
    for group in groups:
        for concurrency in plan.concurrencies:
            order = list(rounds(group, plan.rounds, plan.seed, concurrency))
            if not any(_missing(plan, journal, group, concurrency, cell) for cell in order):
                continue
            for method in group:  # before the first cell, since starting slows down running servers
                await fleet.client(method)
            pilot = _pilot(group)
            client = await fleet.switch(pilot)
            for method in group:
                if method.server not in works:
                    works[method.server] = await _work_of(fleet, method, work)
            if plan.switchback:
                turns = works[pilot.server]
                await _turns(plan, journal, fleet, group, turns, concurrency, report)
                continue
            if concurrency not in journal.budgets:
                count = await _budget(plan, client, works[pilot.server], concurrency)
                journal.budget(concurrency, count)
            if plan.cached_prompts:
                count = plan.rounds * journal.budgets[concurrency] + concurrency
                await _read_prompts(fleet, group, works, concurrency, count, report)
            for cell in order:
                if _missing(plan, journal, group, concurrency, cell):
                    number, method = cell
                    fields = {} if plan.cached_prompts else method.cache_fields(concurrency, number)
                    asked = works[method.server]
                    asked = asked.of(asked.model, fields)
                    await _cell(journal, fleet, asked, concurrency, number, method, report)
        if not plan.together:
            await fleet.stop(group[0].server)


async def _work_of(fleet: Fleet, method: Method, work: Work) -> Work:
    """`work` as the server for `method` takes it: by its name of the model, without `ignore_eos` if
    it refuses that. Raises RuntimeError if the server answers no request."""
    asked = work.of(await fleet.model_of(method), {})
    takes = await takes_ignore_eos(await fleet.client(method), asked)
    return replace(asked, ignore_eos=takes)


def _missing(
    plan: Plan,
    journal: Journal,
    group: Sequence[Method],
    concurrency: int,
    cell: tuple[int, Method],
) -> bool:
    """Whether a cell has no result yet, and its method has not been dropped."""
    if _key(cell, concurrency) in journal.cells:
        return False
    number, method = cell
    if number < plan.first_rounds:
        return True
    first = {m: _speed(journal, m, concurrency, range(plan.first_rounds)) for m in group}
    return method not in hopeless(first, plan.drop_below)


def _speed(journal: Journal, method: Method, concurrency: int, rounds: Iterable[int]) -> float:
    cells = (journal.cells[_key((number, method), concurrency)] for number in rounds)
    return fmean(cell["tokens_per_second"] for cell in cells)


async def _read_prompts(
    fleet: Fleet,
    group: Sequence[Method],
    works: Mapping[str, Work],
    concurrency: int,
    count: int,
    report: Report,
) -> None:
    """Let every server read the first `count` prompts before a cell is measured. Of a gateway's
    methods one that drafts reads them, since a head reads no prompts while nothing is drafted."""
    for server, methods in servers(group).items():
        reader = max(methods, key=lambda method: (method.kind == "adaptive", method.k))
        client = await fleet.switch(reader)
        prompts = works[server].prompts
        different = next((i for i in range(1, len(prompts)) if prompts[i] == prompts[0]), count)
        jobs = works[server].jobs(0, min(count, different), 1)
        found = await measure(client, jobs, limits=[concurrency] * len(jobs))
        if found["failed"]:
            raise RuntimeError(f"{server} did not read the prompts: {found['failures'][0]}")
        report(f"{server} has read {len(jobs)} prompts")


async def _cell(
    journal: Journal,
    fleet: Fleet,
    work: Work,
    concurrency: int,
    number: int,
    method: Method,
    report: Report,
) -> None:
    client = await fleet.switch(method)
    requests = journal.budgets[concurrency]
    found = await run_cell(client, work, concurrency, requests, number)
    journal.add(
        _key((number, method), concurrency), {**found, "ignore_eos": work.lengths_are_exact}
    )
    if found["failed"]:
        why = found["failures"][0]
        raise RuntimeError(f"{method.name} at {concurrency}: {found['failed']} failed: {why}")
    report(
        f"c={concurrency} round {number} {method.label}: {found['tokens_per_second']:.0f} tok/s "
        f"in {found['seconds']:.1f} s, {requests} requests, client {found['client_cpu']:.0%}"
    )


async def _turns(
    plan: Plan,
    journal: Journal,
    fleet: Fleet,
    group: Sequence[Method],
    work: Work,
    concurrency: int,
    report: Report,
) -> None:
    client = await fleet.client(group[0])
    async with Users(client, work, concurrency) as users:
        await run_turn(client, users, plan.seconds, plan.settle)  # caches and batches fill
        for cell in rounds(group, plan.rounds, plan.seed, concurrency):
            if not _missing(plan, journal, group, concurrency, cell):
                continue
            number, method = cell
            await fleet.switch(method)
            turn = work.of(work.model, method.cache_fields(concurrency, number))
            users.begin(turn, number * PROMPTS // plan.rounds)
            found = await run_turn(client, users, plan.seconds, plan.settle)
            found["ignore_eos"] = work.lengths_are_exact
            journal.add(_key(cell, concurrency), found)
            speed = f"{found['tokens_per_second']:.0f} tok/s"
            report(f"c={concurrency} round {number} {method.label}: {speed}")


def _key(cell: tuple[int, Method], concurrency: int) -> tuple[str, int, int]:
    return cell[1].name, concurrency, cell[0]


def _pilot(group: Sequence[Method]) -> Method:
    """The method by which requests are counted: one without drafts if there is one, the slowest at
    one user and among the fastest at many."""
    plain = [method for method in group if method.kind in ("none", "plain", "off")]
    return (plain or list(group))[0]


async def _budget(plan: Plan, client: Client, work: Work, concurrency: int) -> int:
    if plan.requests is not None:
        return max(plan.requests, 1) * concurrency
    return await requests_for(client, work, concurrency, plan.seconds)
