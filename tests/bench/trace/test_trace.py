"""`aerie bench trace`, `speedup` and `run` against fake servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from bench.load.intervals import of_equal_time
from bench.load.null_server import Script, start
from bench.load.run import SPECULATION
from bench.served import run, speedup
from bench.sweep.cells import Work
from bench.sweep.journal import Journal
from bench.systems.method import parse
from bench.trace import trace_methods
from bench.trace.stages import limits, stages

STATE = json.dumps({"requests": 3, "k": 2})


@pytest.fixture
def serve() -> Any:
    """Start fake servers that live beside a command; returns the address of each."""
    ended: list[Callable[[], None]] = []

    def begin(script: Script) -> str:
        ready, ports, loops = Event(), [], []

        async def live() -> None:
            server, port = await start(script)
            stop = asyncio.Event()
            loops.append((asyncio.get_running_loop(), stop))
            ports.append(port)
            ready.set()
            await stop.wait()
            server.close()

        thread = Thread(target=lambda: asyncio.run(live()))
        thread.start()
        assert ready.wait(10)

        def end() -> None:
            loop, stop = loops[0]
            loop.call_soon_threadsafe(stop.set)
            thread.join(10)

        ended.append(end)
        return f"http://127.0.0.1:{ports[0]}"

    yield begin
    for end in ended:
        end()


def test_stages_are_work_not_time() -> None:
    steps = stages("steps", 24)
    assert [stage.users for stage in steps] == [1, 4, 16, 48, 16, 4, 1]
    assert [stage.requests for stage in steps] == [24, 24, 24, 48, 24, 24, 24]
    assert limits(stages("burst", 2)) == [1] * 2 + [48] * 48 + [1] * 2
    assert limits(stages("visits", 2)) == [1] * 2 + [8] * 8 + [2] * 2 + [16] * 16 + [1] * 2
    with pytest.raises(ValueError, match="steps, burst"):
        stages("waves", 1)


def test_a_trace_is_the_same_requests_for_every_method(serve: Any, tmp_path: Path) -> None:
    script = Script(4, 8, gap_s=0.002, pages={SPECULATION: STATE})
    out = tmp_path / "trace.jsonl"
    options = ["--attach", f"gateway={serve(script)}", "--requests", "2", "--repeats", "1",
               "--traces", "burst", "--methods", "off,k:3,adaptive", "--max-tokens", "8",
               "--out", str(out)]  # fmt: skip
    assert trace_methods.main(options) == 0
    journal = Journal(out)
    assert {key[0] for key in journal.cells} == {"off", "k:3", "adaptive"}
    cells = list(journal.cells.values())
    assert {cell["requests"] for cell in cells} == {52}
    assert all(cell["timeline"][0][1:] == [3, 2] for cell in cells)
    assert 1 < script.most_running <= 48
    assert (tmp_path / "trace.png").exists()
    seen = len(script.seen)
    assert trace_methods.main(options) == 0  # nothing is left to measure
    assert len(script.seen) == seen


def test_the_traces_ratio_is_over_the_best_single_k(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "x.jsonl")
    speeds = {"off": (100.0, 100.0), "k:3": (120.0, 130.0), "adaptive": (150.0, 156.0)}
    for name, values in speeds.items():
        for number, value in enumerate(values):
            journal.add((name, "steps", number), {"tokens_per_second": value, "seconds": 1.0})
    text = "\n".join(trace_methods.report(["steps"], parse("off,k:3,adaptive"), journal))
    assert "K=3" in text
    assert "1.225" in text  # harmonic means: 152.94 / 124.8


def test_methods_of_other_servers_have_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert trace_methods.main(["--methods", "none,adaptive"]) == 1
    assert "none" in capsys.readouterr().err


def test_the_gauge_is_held_against_what_was_measured() -> None:
    cells = {}
    for number in range(3):
        cells["off", 8, number] = {
            "tokens_per_second": 100.0,
            "tokens": 1000,
            "decode_seconds": 8.0,
        }
        cells["adaptive", 8, number] = {
            "tokens_per_second": 150.0, "tokens": 1000, "decode_seconds": 5.0, "gauge": 1.65,
        }  # fmt: skip
    (row,) = speedup.rows(cells)[1:]
    assert row[0] == "8"
    assert row[1].startswith("1.650")
    assert row[2].startswith("1.500")
    assert row[3] == "+10.0%"
    assert row[4].startswith("1.600")
    assert row[5] == "+3.1%"
    # Turns are equally long: what is measured is the mean of their speeds.
    cells["adaptive", 8, 0]["tokens_per_second"] = 225.0
    assert speedup.rows(cells, of_equal_time)[1][2].startswith("1.750")


def test_run_compares_servers_in_turns(
    serve: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = Script(4, 8), Script(4, 8, gap_s=0.01)
    out = tmp_path / "run.jsonl"
    code = run.main([
        "--url", f"fast={serve(one)}", "--url", f"slow={serve(other)}/v1", "--concurrency", "2",
        "--requests", "6", "--repeats", "3", "--workload", "completion", "--out", str(out),
    ])  # fmt: skip
    assert code == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(line["system"] for line in lines) == ["fast"] * 3 + ["slow"] * 3
    assert all(line["tokens"] == 48 for line in lines)
    assert lines[0]["provenance"]["cores"]
    assert {b["model"] for method, _, b in one.seen if method == "POST"} == {"m"}
    (row,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("| slow")]
    assert float(row.split("|")[4].split()[0]) < 1  # over the first


def test_no_repeat_of_run_finds_prompts_of_another_in_a_cache(
    serve: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: every load begins at the first prompt, which a prefix cache has by then."""
    script, other = Script(4, 8), Script(4, 8, refuses=("cache_salt",))
    out = tmp_path / "run.jsonl"
    code = run.main([
        "--url", f"a={serve(script)}", "--url", f"b={serve(other)}", "--concurrency", "1,2",
        "--requests", "2", "--repeats", "2", "--workload", "completion", "--out", str(out),
    ])  # fmt: skip
    assert code == 0
    salts = {body.get("cache_salt", "") for _, _, body in script.seen if body}
    assert len({salt for salt in salts if "probe" not in salt and salt}) == 4
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {(line["system"], line["cache_salt"]) for line in lines} == {("a", True), ("b", False)}
    assert "b refuses cache_salt" in capsys.readouterr().err


def test_run_has_open_loops_and_says_what_failed(serve: Any) -> None:
    good = ["--url", serve(Script(4, 8)), "--rate", "200", "--repeats", "1"]
    assert run.main([*good, "--requests", "8", "--workload", "completion"]) == 0
    bad = ["--url", serve(Script(usage=False)), "--repeats", "1"]
    assert run.main([*bad, "--workload", "completion"]) == 1


def test_work_takes_prompts_around_the_end() -> None:
    from bench.workloads.prompt import Prompt

    work = Work([Prompt(text=str(i)) for i in range(3)], "m", 4, ignore_eos=False)
    jobs = work.jobs(2, 3)
    assert [json.loads(job.body)["prompt"] for job in jobs] == ["2", "0", "1"]
    assert "ignore_eos" not in json.loads(jobs[0].body)
