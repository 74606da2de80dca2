"""Policies in turns against a stand-in engine: what is run, how it goes on, what is concluded."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from bench.ablation.command import main
from bench.ablation.run import START_S, Plan, ablate
from bench.ablation.table import Table
from bench.load.null_server import Script, start
from bench.sweep.fleet import Fleet
from bench.sweep.journal import Journal
from bench.systems.method import parse

METHODS = "policy:full,policy:small,policy:without-runs,off,k:3"
SPEEDS = {"policy:full": 1000.0, "policy:small": 1050.0, "policy:without-runs": 900.0}


class Steered(dict[str, str]):
    """Pages of an engine whose tokens a second depend on the policy whose turn it is."""

    def __init__(self) -> None:
        super().__init__()
        self.script: Script | None = None
        self._tokens, self._at = 0.0, time.perf_counter()

    def get(self, path: str, default: Any = None) -> Any:
        if path != "/metrics":
            return default
        assert self.script is not None
        turns = [body["objective"] for method, _, body in self.script.seen if method == "PATCH"]
        now = time.perf_counter()
        self._tokens += SPEEDS.get(turns[-1], 500.0) * (now - self._at)
        self._at = now
        return f'vllm:generation_tokens_total{{engine="0"}} {self._tokens}\n'

    def __contains__(self, path: object) -> bool:
        return path == "/metrics"


def plan(**changes: Any) -> Plan:
    given: dict[str, Any] = {
        "methods": METHODS, "workloads": ("completion",), "loads": ("1", "2"), "rounds": 3,
        "seconds": 0.1, "settle": 0.01, "requests": 1, "max_tokens": 4, "spread": 0.0, "seed": 1,
        "settings": {},
    }  # fmt: skip
    return Plan(**{**given, **changes})


def run(asked: Plan, file: Path, gap_s: float = 0.002) -> tuple[Journal, Script]:
    async def job() -> tuple[Journal, Script]:
        pages = Steered()
        pages.script = script = Script(20, 20, gap_s=gap_s, pages=pages)
        server, port = await start(script)
        journal = Journal(file)
        journal.begin(asked.entry(), {})
        attached = {"gateway": f"http://127.0.0.1:{port}"}
        try:
            async with Fleet(
                parse(asked.methods), {}, "", file.parent, lambda _: None, attached
            ) as fleet:
                await ablate(asked, journal, fleet, lambda _: None)
        finally:
            server.close()
        return journal, script

    return asyncio.run(job())


def test_every_policy_has_a_turn_at_every_load_in_every_round(tmp_path: Path) -> None:
    asked = plan()
    journal, script = run(asked, tmp_path / "a.jsonl")
    assert set(journal.cells) == set(asked.windows())
    turns = [body for method, _, body in script.seen if method == "PATCH"]
    assert {"objective": "policy:without-runs"} in turns
    assert {"objective": "fixed", "k": 3} in turns and {"objective": "off"} in turns
    lines = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    keys = [tuple(line["key"]) for line in lines if line["kind"] == "cell"]
    assert [number for *_, number in keys] == sorted(number for *_, number in keys)
    orders = {tuple(k[0] for k in keys if k[2:] == ("1", number)) for number in range(3)}
    assert len(orders) > 1, "the order differs from round to round"


def test_it_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    file, asked = tmp_path / "a.jsonl", plan(rounds=2)
    run(plan(rounds=2), file)
    whole = file.read_text().splitlines(keepends=True)
    file.write_text("".join(whole[:-7]))
    before = set(Journal(file).cells)
    journal, _ = run(asked, file)
    assert set(journal.cells) == set(asked.windows())
    again = [tuple(line["key"]) for line in map(json.loads, file.read_text().splitlines())
             if line["kind"] == "cell"]  # fmt: skip
    assert len(again) == len(set(again)), "nothing is measured twice"
    assert before and len(set(journal.cells) - before) == 7


def test_moving_loads_are_the_same_requests_for_all(tmp_path: Path) -> None:
    asked = plan(methods="policy:full,policy:small", loads=("burst",), rounds=1)
    journal, _ = run(asked, tmp_path / "a.jsonl", gap_s=0.0)
    assert {cell["requests"] for cell in journal.cells.values()} == {50}


def test_the_estimate_counts_what_is_left(tmp_path: Path) -> None:
    asked, journal = plan(seconds=3.0, settle=1.0, rounds=2), Journal(tmp_path / "a.jsonl")
    windows = 5 * 2 * 2
    assert asked.seconds_left(journal) == pytest.approx(
        START_S + windows * 4.2 + 2 * 2 * 1.0, rel=0.01
    )
    for key in list(asked.windows())[:10]:
        journal.cells[key] = {}
    assert asked.seconds_left(journal) == pytest.approx(START_S + 10 * 4.2 + 2.0, rel=0.01)
    for key in asked.windows():
        journal.cells[key] = {}
    assert asked.seconds_left(journal) == 0.0


def cells(**speeds: list[float]) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {
        (name.replace("__", ":").replace("_", "-"), "w", load, number): {"tokens_per_second": v}
        for name, values in speeds.items()
        for load in ("1", "8")
        for number, v in enumerate(values)
    }


def test_ratios_are_paired_by_round() -> None:
    """A machine twice as slow in one round: unpaired, the interval would hold 1."""
    found = Table(
        parse("policy:full,policy:small"),
        cells(policy__full=[100, 50, 100, 50], policy__small=[110, 55, 110, 55]), "policy:full",
    )  # fmt: skip
    ratio = found.ratio("policy:small", "policy:full", ("w", "1"))
    assert ratio is not None and ratio.value == pytest.approx(1.1)
    assert ratio.interval == pytest.approx((1.1, 1.1))
    mean = found.geometric("policy:small", "policy:full")
    assert mean is not None and mean.value == pytest.approx(1.1)


def test_a_mechanism_pays_that_gains_somewhere_and_loses_nowhere() -> None:
    table = cells(
        policy__full=[100.0] * 4, policy__without_runs=[96.0, 97.0, 96.0, 97.0],
        policy__without_drift=[99.5, 100.5, 99.8, 100.2], policy__without_growth=[103.0] * 4,
    )  # fmt: skip
    names = "policy:full,policy:without-runs,policy:without-drift,policy:without-growth"
    found = Table(parse(names), table, "policy:full")
    assert found.verdict("runs") == "pays"
    assert found.verdict("drift") == "gains nowhere"
    assert found.verdict("growth") == "loses somewhere"
    assert "1.030 (1.030 to 1.030)" in found.text()


def test_the_best_fixed_k_is_chosen_of_all_that_ran() -> None:
    table = cells(policy__small=[100.0] * 3, off=[50.0] * 3, k__1=[80.0] * 3, k__3=[90.0] * 3)
    found = Table(parse("policy:small,off,k:1,k:3"), table, "policy:small")
    ratio = found.over_best_fixed("policy:small", ("w", "8"))
    assert ratio is not None and ratio.value == pytest.approx(100 / 90)


def test_the_command_says_how_long_and_prints_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.jsonl"
    chosen = [
        "--methods",
        METHODS,
        "--workloads",
        "completion",
        "--loads",
        "1,2",
        "--out",
        str(out),
    ]
    assert main([*chosen, "--rounds", "2", "--seconds", "3", "--estimate"]) == 0
    assert "about 3 minutes for 20 windows" in capsys.readouterr().err
    assert not out.exists()
    run(plan(), out)
    assert main(["--out", str(out), "--table"]) == 0
    printed = capsys.readouterr()
    assert "geometric mean" in printed.out and "over the best fixed K" in printed.out
    assert out.with_suffix(".svg").exists() or "not drawn" in printed.err


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--methods", "policy:best", "no policy"), ("--methods", "none", "one gateway"),
        ("--loads", "hills", "no trace"),
    ],
)  # fmt: skip
def test_what_it_cannot_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, said: str
) -> None:
    assert main([option, value, "--out", str(tmp_path / "a.jsonl"), "--estimate"]) == 1
    assert said in capsys.readouterr().err
