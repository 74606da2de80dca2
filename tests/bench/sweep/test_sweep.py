"""A sweep against fake servers: its requests, their order, and how it continues after a kill."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.validation.json_schema import enforceable
from bench.load.client import Client
from bench.load.intervals import of_equal_time
from bench.load.null_server import Script, start
from bench.load.run import SPECULATION
from bench.options import attached
from bench.sweep import sweep_methods
from bench.sweep.cells import Work, takes_cache_salt, takes_ignore_eos
from bench.sweep.fleet import Fleet
from bench.sweep.journal import Journal, JournalError
from bench.sweep.run import Plan, sweep
from bench.sweep.table import Table
from bench.systems.commands import Shared, command
from bench.systems.method import DEFAULT, RUN, Method, largest_k, parse, servers
from bench.systems.server import ServerError
from bench.workloads.constraints import NAMED
from bench.workloads.prompt import Prompt

METHODS = "none,off,k:3,k:7,adaptive"


def plan(**changes: Any) -> Plan:
    given: dict[str, Any] = {
        "workload": "completion", "chat": False, "methods": METHODS, "concurrencies": (1, 2),
        "rounds": 2, "max_tokens": 8, "seconds": 1.0, "requests": 2, "seed": 1,
        "together": True, "settings": {},
    }  # fmt: skip
    return Plan(**{**given, **changes})


def test_answers_differ_in_length_and_not_between_methods() -> None:
    work = Work([Prompt(text=str(i)) for i in range(7)], "m", 100, ignore_eos=True, spread=0.5)
    lengths = [work.length(number) for number in range(200)]
    assert min(lengths) == 50 and max(lengths) == 150
    assert sum(lengths) / 200 == pytest.approx(100, rel=0.01)
    # Any few in a row are spread as well, and about as much work as any others.
    for first in range(192):
        few = lengths[first : first + 8]
        assert max(few) - min(few) > 70 and sum(few) / 8 == pytest.approx(100, rel=0.12)
    asked = [json.loads(job.body)["max_tokens"] for job in work.jobs(3, 9)]
    assert asked == lengths[3:12]
    assert {json.loads(job.body)["max_tokens"] for job in work.jobs(3, 9, 32)} == {32}
    assert {replace(work, spread=0.0).length(number) for number in range(9)} == {100}


def run(asked: Plan, file: Path, stock: Script, gateway: Script) -> Journal:
    return run_on(asked, file, {"none": stock, "gateway": gateway})


def run_on(asked: Plan, file: Path, scripts: dict[str, Script]) -> Journal:
    """Run a sweep on servers by name."""

    async def all_of_them() -> Journal:
        started = {name: await start(script) for name, script in scripts.items()}
        journal = Journal(file)
        journal.begin(asked.entry(), {})
        addresses = {name: f"http://127.0.0.1:{port}" for name, (_, port) in started.items()}
        methods = parse(asked.methods)
        try:
            async with Fleet(methods, {}, "", file.parent, lambda _: None, addresses) as fleet:
                await sweep(asked, journal, fleet, lambda _: None)
        finally:
            for server, _ in started.values():
                server.close()
        return journal

    return asyncio.run(all_of_them())


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.sweep.cells.CELL_SETTLE_S", 0.0)


def test_every_method_gets_the_same_work_in_every_round(tmp_path: Path) -> None:
    stock, gateway = Script(8, 8), Script(8, 8)
    journal = run(plan(), tmp_path / "a.jsonl", stock, gateway)
    assert len(journal.cells) == 5 * 2 * 2
    assert journal.budgets == {1: 2, 2: 4}
    switches = [body for method, _, body in gateway.seen if method == "PATCH"]
    assert {"objective": "fixed", "k": 7} in switches
    assert {"objective": "throughput", "sources": []} in switches
    # A stock server is never steered, and each cell of a round asks the same prompts.
    assert not [path for method, path, _ in stock.seen if method == "PATCH"]
    asked: dict[str, list[str]] = {"stock": [], "gateway": []}
    for name, script in (("stock", stock), ("gateway", gateway)):
        asked[name] = [
            b["prompt"] for m, _, b in script.seen if m == "POST" and b["max_tokens"] == 8
        ]
    assert set(asked["stock"]) >= set(asked["gateway"])
    assert all(body["ignore_eos"] for method, _, body in gateway.seen if method == "POST")


def test_each_choice_of_sources_is_switched_to(tmp_path: Path) -> None:
    """Catches: `adaptive` after `adaptive:head` goes on without the other sources, since a gateway
    keeps them through a PATCH that does not name any."""
    gateway = Script(2, 2)
    methods = "adaptive,adaptive:head,adaptive:head+lookup,off"
    run(plan(methods=methods, rounds=1), tmp_path / "a.jsonl", Script(2, 2), gateway)
    switches = [body for method, _, body in gateway.seen if method == "PATCH"]
    adaptive = [body["sources"] for body in switches if body["objective"] == "throughput"]
    assert set(map(tuple, adaptive)) == {(), ("head",), ("head", "lookup")}
    assert {"objective": "off"} in switches


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize(
    ("state", "changes"),
    [
        (
            {"objective": "fixed", "k": 4, "tpot_s": None, "sources": ["head"]},
            {"objective": "fixed", "k": 4, "sources": ["head"]},
        ),
        (
            {"objective": "latency", "k": 3, "tpot_s": 0.02, "sources": ["head", "lookup"]},
            {"objective": "latency", "tpot_s": 0.02, "sources": ["head", "lookup"]},
        ),
    ],
    ids=["fixed", "latency"],
)
def test_an_attached_gateway_is_set_back(
    tmp_path: Path, usage: bool, state: dict[str, Any], changes: dict[str, Any]
) -> None:
    """After a failure too: here of every request."""
    gateway = Script(2, 2, usage=usage, pages={SPECULATION: json.dumps(state)})
    asked = plan(methods="off,adaptive", concurrencies=(1,), rounds=1)
    with contextlib.nullcontext() if usage else pytest.raises(RuntimeError, match="usage"):
        run(asked, tmp_path / "a.jsonl", Script(2, 2), gateway)
    switches = [body for method, _, body in gateway.seen if method == "PATCH"]
    assert switches[0] == {"objective": "off"}
    assert switches[-1] == changes
    assert switches.count(changes) == 1


def test_an_attached_gateway_that_has_ended_hides_no_error(tmp_path: Path) -> None:
    told: list[str] = []

    async def end() -> None:
        pages = {SPECULATION: json.dumps({"objective": "off", "k": 0, "sources": []})}
        server, port = await start(Script(pages=pages))
        attached = {"gateway": f"http://127.0.0.1:{port}"}
        (method,) = parse("adaptive")
        async with Fleet([method], {}, "", tmp_path, told.append, attached) as fleet:
            client = await fleet.switch(method)
            server.close()
            client.url = "http://127.0.0.1:9"
            raise RuntimeError("a request failed")

    with pytest.raises(RuntimeError, match="a request failed"):
        asyncio.run(end())
    assert len(told) == 1 and told[0].startswith('gateway was not set back to {"objective": "off"')


class PagesThatGrow(dict[str, str]):
    """Pages of a server that makes so many tokens a second, whoever asks."""

    speed = 1000.0

    def get(self, path: str, default: Any = None) -> Any:
        if path != "/metrics":
            return default
        tokens = int(self.speed * time.perf_counter())
        return f'vllm:generation_tokens_total{{engine="0"}} {tokens}\n'

    def __contains__(self, path: object) -> bool:
        return path == "/metrics"


def test_turns_are_taken_under_one_load(tmp_path: Path) -> None:
    gateway = Script(20, 20, gap_s=0.005, pages=PagesThatGrow())
    asked = plan(methods="off,k:3,adaptive", seconds=0.4, rounds=2, switchback=True, settle=0.01)
    journal = run(asked, tmp_path / "a.jsonl", Script(2, 2), gateway)
    assert len(journal.cells) == 3 * 2 * 2
    assert gateway.most_running == 2
    for cell in journal.cells.values():
        # Pages are read on the loop that the load runs on.
        assert cell["tokens_per_second"] == pytest.approx(1000.0, rel=0.3)
        assert cell["tokens"] == pytest.approx(1000.0 * cell["seconds"], rel=0.3)
        assert cell["seconds"] >= 0.39
    steered = [body["objective"] for method, _, body in gateway.seen if method == "PATCH"]
    assert {name: steered.count(name) for name in steered} == {
        # The first two are for the pilot that finds out what the server takes.
        "off": 2 + 2 * 2, "fixed": 2 * 2, "throughput": 2 * 2,
    }  # fmt: skip
    # Every method of a round is asked the same; a request may slip in just before.
    turns: list[list[str]] = []
    for method, _, body in gateway.seen:
        if method == "PATCH":
            turns.append([])
        elif method == "POST" and turns:
            turns[-1].append(body["prompt"])
    rounds = turns[-6:-3], turns[-3:]
    same = []
    for turn in rounds:
        asked_all = min(6, *map(len, turn))  # a machine that pauses makes few in a turn
        same.append(set.intersection(*(set(asked_for[:asked_all]) for asked_for in turn)))
        assert len(same[-1]) >= asked_all - 2
    assert not same[0] & same[1]
    text = Table(parse(asked.methods), journal.cells).text()
    assert "Adaptive over the best fixed K" in text and "without start and tail" not in text


def test_each_attached_server_is_asked_for_its_own_model(tmp_path: Path) -> None:
    """By the default model's name, where it lists that, or else by the first that it lists."""
    stock = Script(8, 8, model="org/other")
    gateway = Script(8, 8, model="smollm2-135m", pages=PagesThatGrow())
    run(plan(), tmp_path / "a.jsonl", stock, gateway)
    for_turns = plan(methods="off,k:3", seconds=0.2, switchback=True, settle=0.01)
    run(for_turns, tmp_path / "b.jsonl", stock, gateway)
    for script in (stock, gateway):
        asked = {b["model"] for method, _, b in script.seen if method == "POST"}
        assert asked == {script.model}


@pytest.mark.parametrize("switchback", [False, True])
def test_no_method_reads_prompts_for_another(tmp_path: Path, switchback: bool) -> None:
    """Catches: the first method of a round fills the prefix cache of the others. A server that is
    not ours may not know the field."""
    stock, gateway = Script(8, 8), Script(8, 8, pages=PagesThatGrow())
    methods = "off,k:3,adaptive" if switchback else "none,off,k:3,adaptive"
    asked = plan(methods=methods, seconds=0.2, switchback=switchback, settle=0.01)
    run(asked, tmp_path / "a.jsonl", stock, gateway)
    assert not [body for method, _, body in stock.seen if "cache_salt" in body]
    salts = {body["cache_salt"] for _, _, body in gateway.seen if "cache_salt" in body}
    cells = [(c, number) for c in (1, 2) for number in (0, 1)]
    names = ("off", "k:3", "adaptive")
    assert salts == {f"{RUN} {name} {c} {number}" for name in names for c, number in cells}


def test_cached_prompts_are_read_once_by_a_method_that_drafts(tmp_path: Path) -> None:
    """Catches: the first method of a round reads the prompts for the others; a head that has never
    read the prompts that it drafts behind, as they were read at K = 0."""
    stock, gateway = Script(8, 8), Script(8, 8)
    asked = plan(methods="none,off,adaptive,k:3", concurrencies=(2,), cached_prompts=True)
    run(asked, tmp_path / "a.jsonl", stock, gateway)
    for script in (stock, gateway):
        posts = [body for method, _, body in script.seen if method == "POST"]
        assert not [body for body in posts if "cache_salt" in body]
        read = [body["prompt"] for body in posts if body["max_tokens"] == 1]
        assert len(read) == len(set(read)) == 2 * 4 + 2  # two rounds, and the last warm-up
        assert {body["prompt"] for body in posts if body["max_tokens"] == 8} <= set(read)
    before = []
    for method, _, body in gateway.seen:
        if method == "POST" and body["max_tokens"] == 1:
            break
        before += [body["objective"]] if method == "PATCH" else []
    assert before[-1] == "throughput"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--methods", "none,off"], "methods of one server"),
        (["--methods", "off,k:1", "--cached-prompts"], "no --cached-prompts"),
    ],
)
def test_turns_that_would_be_unfair_are_refused(
    options: list[str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "a.jsonl")
    assert sweep_methods.main([*options, "--switchback", "--out", out]) == 1
    assert why in capsys.readouterr().err


def test_cached_prompts_of_a_small_file_are_read_once_each(tmp_path: Path) -> None:
    file = tmp_path / "few.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"prompt {i}"}) + "\n" for i in range(3)))
    gateway = Script(8, 8)
    asked = plan(workload=str(file), methods="off,k:3", concurrencies=(2,), cached_prompts=True)
    run(asked, tmp_path / "a.jsonl", Script(8, 8), gateway)
    posts = [body for method, _, body in gateway.seen if method == "POST"]
    assert len([body for body in posts if body["max_tokens"] == 1]) == 3


def test_cached_prompts_that_a_server_does_not_read_end_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.sweep.run.takes_ignore_eos", takes)
    asked = plan(methods="off", concurrencies=(1,), cached_prompts=True)
    with pytest.raises(RuntimeError, match=r"gateway did not read the prompts: .*usage"):
        run(asked, tmp_path / "a.jsonl", Script(), Script(4, 8, usage=False))


def test_a_turn_without_tokens_or_with_failures_is_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = plan(methods="off,adaptive", seconds=0.05, switchback=True, settle=0.01)
    idle = PagesThatGrow()
    idle.speed = 0.0
    with pytest.raises(RuntimeError, match="did not grow"):
        run(asked, tmp_path / "a.jsonl", Script(2, 2), Script(20, 20, gap_s=0.005, pages=idle))
    monkeypatch.setattr("bench.sweep.run.takes_ignore_eos", takes)
    broken = Script(20, 20, gap_s=0.005, pages=PagesThatGrow(), done=False)
    with pytest.raises(RuntimeError, match="a request failed"):
        run(asked, tmp_path / "b.jsonl", Script(2, 2), broken)


async def takes(*_: Any) -> bool:
    return True


def test_rounds_differ_in_order_and_not_in_methods(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    run(plan(rounds=4, concurrencies=(1,), requests=1), file, Script(2, 2), Script(2, 2))
    keys = [e["key"] for e in map(json.loads, file.read_text().splitlines()) if e["kind"] == "cell"]
    orders = [[name for name, _, number in keys if number == n] for n in range(4)]
    assert len(set(map(tuple, orders))) > 1
    assert {frozenset(order) for order in orders} == {frozenset(METHODS.split(","))}
    assert [number for *_, number in keys] == sorted(number for *_, number in keys)


@pytest.mark.parametrize(("rounds", "fewest"), [(3, 1), (12, 2)])
def test_a_k_that_falls_far_behind_has_a_sixth_of_the_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int, fewest: int
) -> None:
    speeds = {"none": 9.0, "off": 100.0, "k:3": 51.0, "k:7": 49.0, "adaptive": 40.0}

    async def found(client: Any, work: Any, concurrency: int, requests: int, number: int) -> Any:
        name = names.pop()
        speed = speeds[name]
        if name == "k:3" and fewest > 1 and number < fewest:  # one round alone is luck
            speed = [30.0, 80.0][number]
        return {"tokens_per_second": speed, "failed": 0, "seconds": 1.0, "client_cpu": 0.0}

    names: list[str] = []
    switch = Fleet.switch

    async def noted(self: Fleet, method: Method) -> Any:
        names[:] = [method.name]
        return await switch(self, method)

    monkeypatch.setattr("bench.sweep.run.run_cell", found)
    monkeypatch.setattr(Fleet, "switch", noted)
    asked = plan(rounds=rounds, concurrencies=(1,), drop_below=0.5)
    journal = run(asked, tmp_path / "a.jsonl", Script(2, 2), Script(2, 2))
    had = {name: sum(key[0] == name for key in journal.cells) for name in speeds}
    assert had == {name: fewest if name == "k:7" else rounds for name in speeds}
    # It is in the table, and does not take the other rounds from the comparison.
    table = Table(parse(METHODS), journal.cells)
    assert table.rows[Method("k", 7), 1].rounds == fewest
    assert table.rows[Method("adaptive"), 1].rounds == rounds
    assert [(b.best.name, b.ratio) for b in table.best] == [("off", pytest.approx(0.4))]
    assert table.best[0].interval is not None


def test_a_killed_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    whole = run(plan(), file, Script(4, 8), Script(4, 8))
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:9]) + lines[9][:25])  # killed in the middle of a line
    kept = set(Journal(file).cells)
    assert 0 < len(kept) < len(whole.cells)
    stock, gateway = Script(4, 8), Script(4, 8)
    again = run(plan(), file, stock, gateway)
    assert set(again.cells) == set(whole.cells)
    assert again.budgets == whole.budgets
    assert [json.loads(line) for line in file.read_bytes().splitlines()]  # every line is whole
    nothing = Script(4, 8)
    run(plan(), file, nothing, nothing)
    assert nothing.seen == []


def test_results_of_another_plan_are_not_mixed(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    run(plan(concurrencies=(1,), rounds=1), file, Script(2, 2), Script(2, 2))
    with pytest.raises(JournalError, match="max_tokens"):
        Journal(file).begin(plan(concurrencies=(1,), rounds=1, max_tokens=9).entry(), {})
    other = tmp_path / "b.jsonl"
    other.write_text('{"kernel": 1}\n')
    with pytest.raises(JournalError):
        Journal(other)


def test_another_head_server_or_setting_of_the_environment_is_another_plan(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: a file goes on with figures of another head or server, under one plan."""
    out = tmp_path / "a.jsonl"
    monkeypatch.setattr("bench.sweep.sweep_methods._draw", lambda *_: None)
    urls = [serve(Script(2, 2)), serve(Script(2, 2))]

    def main(url: str, *more: str) -> int:
        return sweep_methods.main([
            "--methods", "off", "--workload", "completion", "--concurrency", "1", "--rounds", "1",
            "--requests", "1", "--attach", f"gateway={url}", "--out", str(out), *more,
        ])  # fmt: skip

    assert main(urls[0]) == 0
    monkeypatch.setenv("AERIE_API_KEY", "secret")
    assert main(urls[0]) == 0  # a key changes no figure, and is not written
    assert "secret" not in out.read_text()
    for differs, url, more in (
        ("attached", urls[1], ()), ("eagle3", urls[0], ("--eagle3", "heads/e")),
    ):  # fmt: skip
        assert main(url, *more) == 1
        assert f"another plan ({differs} differ)" in capsys.readouterr().err
    monkeypatch.setenv("AERIE_MAX_NUM_SEQS", "4")
    assert main(urls[0]) == 1
    assert "another plan (environment differ)" in capsys.readouterr().err


def test_an_attached_server_that_no_method_has_is_refused() -> None:
    """Catches: a misspelt name is passed over, and an engine is started instead."""
    names = servers(parse("off,k:3,other:x"))
    assert attached(["x=http://a"], names) == {"x": "http://a"}
    with pytest.raises(ValueError, match=r"--attach gatewya=.*are gateway, x"):
        attached(["gatewya=http://a"], names)


@pytest.mark.parametrize(
    ("failure", "refuses"), [("HTTP 400: x", True), ("HTTP 422: x", True), ("HTTP 429: x", None)]
)
async def test_a_server_that_is_busy_refuses_no_field(
    monkeypatch: pytest.MonkeyPatch, failure: str, refuses: bool | None
) -> None:
    """Catches: a server whose cache may hold the prompts, because it was busy at the first one."""

    async def measure(client: Client, jobs: Any, **_: Any) -> dict[str, Any]:
        body = json.loads(jobs[0].body)
        if "cache_salt" in body or "ignore_eos" in body:
            return {"failed": 1, "failures": [failure]}
        return {"failed": 0}

    monkeypatch.setattr("bench.sweep.cells.measure", measure)
    work = Work([Prompt(text="x")], "m", 8, ignore_eos=False)
    for asking in (
        takes_cache_salt(Client("http://a"), work),
        takes_ignore_eos(Client("http://a"), replace(work, ignore_eos=True)),
    ):
        if refuses is None:
            with pytest.raises(RuntimeError, match="answers no request: HTTP 429"):
                await asking
        else:
            assert await asking is False


@pytest.mark.parametrize("name", ["commit", "versions", "cpu", "cores", "gpus"])
def test_results_of_another_source_or_machine_are_not_continued(tmp_path: Path, name: str) -> None:
    """Catches: a table of old figures under today's commit, versions and hardware."""
    here = {
        "commit": "a", "versions": {"vllm": "1"}, "cpu": "b", "cores": 2, "gpus": ["c"],
        "date": "then",
    }  # fmt: skip
    journal = Journal(tmp_path / "a.jsonl")
    journal.begin({}, here)
    Journal(tmp_path / "a.jsonl").begin({}, {**here, name: "other"})  # it has no figures yet
    journal.begin({}, here)
    journal.add(("off", 1), {"step_ms": 1.0})
    with pytest.raises(JournalError, match=f"{name} differ.*another --out, or remove the file"):
        Journal(tmp_path / "a.jsonl").begin({}, {**here, name: "other"})
    Journal(tmp_path / "a.jsonl").begin({}, {**here, "date": "now", "load_average": 3.0})


def test_a_cell_that_fails_ends_the_sweep_and_runs_again(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    asked = plan(methods="off", concurrencies=(1,), rounds=1)
    with pytest.raises(RuntimeError, match="usage"):
        run(asked, file, Script(), Script(4, 8, usage=False))
    assert Journal(file).cells == {}
    assert len(run(asked, file, Script(), Script(4, 8)).cells) == 1


def test_a_server_without_ignore_eos_is_asked_without(tmp_path: Path) -> None:
    gateway = Script(4, 8, refuses=("ignore_eos",))
    journal = run(plan(methods="off", concurrencies=(1,)), tmp_path / "a.jsonl", Script(), gateway)
    assert all(cell["ignore_eos"] is False for cell in journal.cells.values())


@pytest.mark.parametrize("together", [True, False])
def test_each_server_is_asked_for_itself(tmp_path: Path, together: bool) -> None:
    """Catches: a server that refuses `ignore_eos` ends the sweep, or changes the work of others."""
    scripts = {
        "none": Script(4, 8), "middle": Script(4, 8, refuses=("ignore_eos",)),
        "gateway": Script(4, 8),
    }  # fmt: skip
    asked = plan(methods="none,other:middle,off", concurrencies=(1,), together=together)
    journal = run_on(asked, tmp_path / "a.jsonl", scripts)
    exact = {name: cell["ignore_eos"] for (name, *_), cell in journal.cells.items()}
    assert exact == {"none": True, "other:middle": False, "off": True}


@pytest.mark.parametrize("name", [*NAMED, "file"])
def test_every_request_of_a_sweep_is_held_to_its_constraint(tmp_path: Path, name: str) -> None:
    """Those that find out how many fit a cell, and those of the warm-up, too."""
    fields = NAMED.get(name, {"structured_outputs": {"regex": "a+"}})
    if name == "file":
        name = str(tmp_path / "fields.json")
        Path(name).write_text(json.dumps(fields))
    gateway = Script(4, 8)
    asked = plan(
        methods="off,adaptive", concurrencies=(1,), requests=None, seconds=0.02, constraint=name
    )
    journal = run(asked, tmp_path / "a.jsonl", Script(), gateway)
    assert journal.plan is not None
    assert journal.plan["constraint"] == name
    bodies = [body for method, _, body in gateway.seen if method == "POST"]
    assert len(bodies) > 8
    for body in bodies:
        assert fields.items() <= body.items()
        assert "ignore_eos" not in body, "there is nothing to generate past a constraint's end"


def test_every_request_of_a_sweep_has_its_temperature(tmp_path: Path) -> None:
    for temperature in (0.0, 0.7):
        gateway = Script(4, 8)
        asked = plan(methods="off,adaptive", concurrencies=(1,), temperature=temperature)
        journal = run(asked, tmp_path / f"{temperature}.jsonl", Script(), gateway)
        assert journal.plan is not None and journal.plan["temperature"] == temperature
        bodies = [body for method, _, body in gateway.seen if method == "POST"]
        assert {body["temperature"] for body in bodies} == {temperature}


@pytest.mark.parametrize("text", [None, "[]", "{"])
def test_a_constraint_that_is_none_is_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "fields.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match="--constraint"):
        run(plan(constraint=str(file)), tmp_path / "a.jsonl", Script(), Script())


def test_named_constraints_are_enforced_whole() -> None:
    schema = NAMED["json-schema"]["response_format"]["json_schema"]["schema"]
    assert enforceable(schema)[1] == []
    assert NAMED["tools"]["tools"][0]["function"]["parameters"] == schema


def cells(speeds: dict[str, list[float]], concurrency: int = 1) -> dict[tuple[Any, ...], Any]:
    return {
        (name, concurrency, number): {"tokens_per_second": speed, "user_tokens_per_second": speed}
        for name, values in speeds.items()
        for number, speed in enumerate(values)
    }


def test_the_table_divides_within_rounds() -> None:
    speeds = {
        "none": [100.0, 50.0, 80.0], "eagle3:3": [150.0, 75.0, 120.0], "k:3": [180.0, 90.0, 144.0],
        "k:7": [200.0, 100.0, 160.0], "adaptive": [198.0, 99.0, 158.4],
    }  # fmt: skip
    table = Table(parse("none,eagle3:3,k:3,k:7,adaptive"), cells(speeds))
    row = table.rows[Method("adaptive"), 1]
    assert row.over["none"][0] == pytest.approx(1.98)
    assert row.over["EAGLE-3"][0] == pytest.approx(1.32)
    assert row.over["none"][1] == pytest.approx((1.98, 1.98))
    (best,) = table.best
    assert (best.best.k, best.ratio) == (7, pytest.approx(0.99))
    text = table.text()
    assert "| 1 | K=7        | 0.990           | 0.990 to 0.990 |" in text
    assert "1.98 ±0.00" in text


def test_adaptive_of_all_sources_is_the_one_that_is_compared() -> None:
    """Wherever it stands in the plan; the head alone is a baseline."""
    speeds = {"off": [50.0, 25.0], "adaptive:head": [40.0, 20.0], "adaptive": [100.0, 50.0]}
    table = Table(parse("off,adaptive:head,adaptive"), cells(speeds))
    assert [best.ratio for best in table.best] == [pytest.approx(2.0)]
    over = table.rows[Method("adaptive"), 1].over
    assert {name: ratio for name, (ratio, _) in over.items()} == {
        "none": pytest.approx(2.0), "the head alone": pytest.approx(2.5),
    }  # fmt: skip
    heading = "Over the head alone (this gateway, adaptive K without other sources) in the same"
    assert heading in table.text()


def test_k_0_alone_is_no_best_fixed_k() -> None:
    """Its ratio is printed under its own name."""
    speeds = {"off": [100.0], "adaptive": [142.1]}
    text = Table(parse("off,adaptive"), cells(speeds)).text()
    assert "Adaptive over K = 0 (no other fixed K was measured):" in text
    assert "best fixed K" not in text
    fixed = Table(parse("off,k:3,adaptive"), cells({**speeds, "k:3": [90.0]})).text()
    assert "Adaptive over the best fixed K (K = 0 included" in fixed


def test_a_k_that_was_dropped_after_one_of_two_rounds_takes_none_from_the_others() -> None:
    speeds = {"off": [100.0, 100.0], "k:3": [110.0, 140.0], "k:7": [40.0], "adaptive": [120.0] * 2}
    (best,) = Table(parse("off,k:3,k:7,adaptive"), cells(speeds)).best
    assert (best.best.name, best.ratio) == ("k:3", pytest.approx(120.0 / (2 / (1 / 110 + 1 / 140))))


def test_answers_that_the_model_ended_are_marked() -> None:
    ended = cells({"off": [100.0], "adaptive": [150.0]})
    for cell in ended.values():
        cell["ignore_eos"] = True
    assert "*" not in Table(parse("off,adaptive"), ended).text()
    ended["adaptive", 1, 0]["ignore_eos"] = False
    text = Table(parse("off,adaptive"), ended).text()
    assert "| 1 | 100 | 150*     |" in text and "\n*: the model ended its answers" in text


def test_turns_of_equal_time_are_not_rounds_of_equal_work() -> None:
    uneven = cells({"off": [100.0, 100.0], "k:3": [50.0, 150.0], "adaptive": [40.0, 160.0]})
    methods = parse("off,k:3,adaptive")
    assert Table(methods, uneven, of_equal_time).best[0].ratio == pytest.approx(1.0)
    assert Table(methods, uneven).best[0].ratio == pytest.approx(0.64)


def test_over_the_loads_the_mean_is_geometric() -> None:
    few = {"off": [100.0], "k:3": [160.0], "adaptive": [80.0]}
    many = {"off": [200.0], "k:3": [160.0], "adaptive": [400.0]}
    table = Table(parse("off,k:3,adaptive"), cells(few) | cells(many, 8))
    assert [best.ratio for best in table.best] == [0.5, 2.0]
    assert "| geometric mean |            | 1.000           |" in table.text()


def test_adaptive_is_compared_without_start_and_tail_too() -> None:
    whole = cells({"off": [100.0], "k:3": [90.0], "adaptive": [95.0]})
    for (name, *_), cell in whole.items():
        steady = {"off": 110.0, "k:3": 130.0, "adaptive": 131.3}[name]
        cell["steady_tokens_per_second"] = steady
    table = Table(parse("off,k:3,adaptive"), whole)
    assert [(b.best.name, b.ratio) for b in table.best] == [("off", pytest.approx(0.95))]
    assert [(b.best.name, b.ratio) for b in table.steady] == [("k:3", pytest.approx(1.01))]
    assert "every user is served" in table.text()
    del whole["adaptive", 1, 0]["steady_tokens_per_second"]
    assert Table(parse("off,k:3,adaptive"), whole).steady == []


def test_acceptance_by_position_adds_up_to_the_length_where_k_differs_between_rounds() -> None:
    drafted = cells({"adaptive": [100.0, 100.0, 100.0]})
    drafted["adaptive", 1, 0] |= {"acceptance": [0.8, 0.5], "acceptance_length": 2.3}
    drafted["adaptive", 1, 1] |= {"acceptance": [0.8], "acceptance_length": 1.8}
    row = Table(parse("adaptive"), drafted).rows[Method("adaptive"), 1]  # one round drafts nothing
    assert row.acceptance == pytest.approx([0.8, 0.25])
    assert 1.0 + sum(row.acceptance) == pytest.approx(row.figures["length"])


def test_an_unfinished_sweep_has_a_table() -> None:
    found = Table(parse("none,k:3,adaptive"), cells({"none": [100.0], "k:3": [150.0]}))
    assert "1.50" in found.text()
    assert found.best == []
    assert Table(parse("none"), {}).text()


def test_sources_of_adaptive_drafts_by_name() -> None:
    (method,) = parse("adaptive:lookup+grammar")
    assert (method.name, method.sources) == ("adaptive:lookup+grammar", ("lookup", "grammar"))
    assert (method.label, method.server) == ("adaptive lookup+grammar", "gateway")
    for wrong in ("adaptive:", "adaptive:tree", "adaptive:head+head", "off:head"):
        with pytest.raises(ValueError, match=re.escape(wrong)):
            parse(wrong)


def test_accepted_drafts_are_tabled_by_source() -> None:
    found = cells({"off": [100.0], "adaptive": [150.0]})
    found["adaptive", 1, 0] |= {
        "tokens": 200,
        "sources": {
            "head": {"drafted": 90, "accepted": 50}, "lookup": {"drafted": 99, "accepted": 60},
        },
    }  # fmt: skip
    text = Table(parse("off,adaptive"), found).text()
    assert "head 25%, lookup 30%" in text


def test_methods_by_name() -> None:
    methods = parse(DEFAULT)
    assert ",".join(method.name for method in methods) == DEFAULT
    assert largest_k(methods) == 7
    assert list(servers(methods)) == ["none", "eagle3:3", "gateway"]
    for wrong in ("k", "k:0", "fast", "none:3", "k:3,k:3", ""):
        with pytest.raises(ValueError, match=r"k|method"):
            parse(wrong)


def test_each_head_has_a_gateway_of_its_own(tmp_path: Path) -> None:
    """One sweep: none, upstream's EAGLE-3, ours fixed and adaptive, P-EAGLE."""
    text = "none,eagle3:3,ours-eagle3:off,ours-eagle3:3,ours-eagle3:adaptive,k:3,adaptive"
    methods = parse(text)
    assert ",".join(method.name for method in methods) == text
    assert list(servers(methods)) == ["none", "eagle3:3", "ours-eagle3", "gateway"]
    assert [m.changes for m in methods[2:5]] == [m.changes for m in parse("off,k:3,adaptive")]
    assert methods[3].label == "our EAGLE-3 K=3"
    for wrong in ("ours-eagle3", "ours-eagle3:0", "ours-eagle3:fast"):
        with pytest.raises(ValueError, match="give K, off or adaptive"):
            parse(wrong)
    shared = Shared.of(7, {"max_num_seqs": 32}, "heads/e", "", tmp_path)
    line, _ = command(methods[3], shared, 1)
    assert "--drafter=heads/e" in line and "--k=7" in line and "serve" in line
    assert not [part for part in command(methods[5], shared, 1)[0] if part.startswith("--drafter")]


def test_adaptive_is_held_against_the_fixed_ks_of_its_own_head() -> None:
    speeds = {
        "k:3": [100.0], "adaptive": [90.0], "ours-eagle3:3": [60.0], "ours-eagle3:adaptive": [57.0],
    }  # fmt: skip
    table = Table(parse("k:3,adaptive,ours-eagle3:3,ours-eagle3:adaptive"), cells(speeds))
    assert [(b.head, b.best.name, b.ratio) for b in table.best] == [
        ("", "k:3", pytest.approx(0.9)), ("eagle3", "ours-eagle3:3", pytest.approx(0.95)),
    ]  # fmt: skip
    assert "chosen after the fact), our EAGLE-3:" in table.text()


def test_another_server_is_attached_by_its_name_and_never_started(tmp_path: Path) -> None:
    methods = parse("other:llama.cpp,off")
    assert [(m.name, m.label, m.server) for m in methods] == [
        ("other:llama.cpp", "llama.cpp", "llama.cpp"), ("off", "K=0", "gateway"),
    ]  # fmt: skip
    for wrong in ("other", "other:", "other:a b", "other:x,other:x"):
        with pytest.raises(ValueError, match=r"other"):
            parse(wrong)

    async def start() -> None:
        async with Fleet(methods, {}, "", tmp_path, lambda _: None) as fleet:
            await fleet.client(methods[0])

    with pytest.raises(ServerError, match=r"--attach llama\.cpp=URL"):
        asyncio.run(start())


def test_both_sides_get_the_same_engine_arguments(tmp_path: Path) -> None:
    shared = Shared.of(7, {"max_num_seqs": 32, "max_model_len": 512}, "heads/e", "", tmp_path)
    stock, environment = command(Method("eagle3", 3), shared, 1)
    assert environment["VLLM_PLUGINS"] == "none"
    ours, _ = command(Method("k", 7), shared, 1)
    for option in ("--max-num-seqs=32", "--max-model-len=512", "--max-num-batched-tokens=4096",
                   "--no-enable-prefix-caching"):  # fmt: skip
        assert option in stock
        assert option in ours
    assert "--k=7" in ours
    assert speculative(stock) == {
        "method": "eagle3", "model": "heads/e", "num_speculative_tokens": 3
    }  # fmt: skip
    assert not [part for part in stock if "scheduler-cls" in part or "additional-config" in part]
    plain, _ = command(Method("none"), shared, 1)
    assert not [part for part in plain if "speculative" in part]


def speculative(line: list[str]) -> Any:
    (config,) = [part for part in line if part.startswith("--speculative-config=")]
    return json.loads(config.partition("=")[2])
