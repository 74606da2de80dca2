"""`aerie bench trace`, `speedup` and `run` against fake servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.load.client import Client
from bench.load.intervals import of_equal_time, of_equal_work
from bench.load.null_server import Script
from bench.load.run import SPECULATION
from bench.served import run, speedup
from bench.sweep import sweep_methods
from bench.sweep.cells import Work
from bench.sweep.journal import Journal
from bench.systems.method import parse
from bench.trace import trace_methods
from bench.trace.stages import limits, stages

STATE = json.dumps({"requests": 3, "k": 2})


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
    speeds = {
        name: of_equal_work([x["tokens_per_second"] for x in lines if x["system"] == name])
        for name in ("fast", "slow")  # unless this machine pauses in a fast one
    }
    over_first = float(row.split("|")[4].split()[0])
    assert over_first == pytest.approx(speeds["slow"] / speeds["fast"], abs=0.001)


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


def test_an_open_loops_table_has_the_tokens_of_its_steady_part(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "ARRIVALS_S", 1.0)
    out = tmp_path / "run.jsonl"
    url = serve(Script(10, 20, gap_s=0.02))
    assert run.main([
        "--url", url, "--rate", "30", "--repeats", "1", "--workload", "completion",
        "--out", str(out),
    ]) == 0  # fmt: skip
    (line,) = [json.loads(text) for text in out.read_text().splitlines()]
    assert line["requests"] == 30
    assert line["steady_tokens_per_second"] != line["tokens_per_second"]
    row = capsys.readouterr().err.splitlines()[-1].split("|")
    assert row[3].strip() == f"{line['steady_tokens_per_second']:.0f}"


def test_fewer_requests_than_users_are_refused(
    serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Script(4, 8)
    assert run.main(["--url", serve(script), "--concurrency", "1,8", "--requests", "4"]) == 1
    assert "--requests 4 is less than 8 users" in capsys.readouterr().err
    assert script.seen == []


def test_a_server_that_ends_is_a_row_and_not_the_end(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first server too, over which ratios are."""
    gone, other = serve(Script(4, 8)), serve(Script(4, 8))
    measured = run.measure

    async def measure(client: Client, *given: Any, **more: Any) -> Any:
        if client.url == gone:
            raise RuntimeError("GET /metrics: ServerDisconnectedError")
        return await measured(client, *given, **more)

    monkeypatch.setattr(run, "measure", measure)
    out = tmp_path / "run.jsonl"
    assert run.main([
        "--url", f"a={gone}", "--url", f"b={other}", "--concurrency", "1", "--requests", "2",
        "--repeats", "2", "--workload", "completion", "--out", str(out),
    ]) == 1  # fmt: skip
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["failures"] for line in lines if line["system"] == "a"] == [
        ["GET /metrics: ServerDisconnectedError"]
    ] * 2
    told = capsys.readouterr().err.splitlines()
    rows = {row.split("|")[1].strip(): row for row in told if row.startswith("| ")}
    assert "4 in 2 of 2 repeats" in rows["a"]
    assert rows["b"].split("|")[3].strip() and rows["b"].rstrip(" |").endswith("0")


RESULTS = Path(run.__file__).parents[1] / "results"


@pytest.mark.parametrize(
    ("command", "file", "text"),
    [
        (sweep_methods, "headline-smollm2-intel-amx-2cpu", "Adaptive over K = 0 (no other"),
        (sweep_methods, "adaptive-smollm2-lasting-batches-intel-amx-2cpu", "geometric mean | "),
        (trace_methods, "trace-smollm2-intel-amx-2cpu", "adaptive / best"),
        (speedup, "speedup-smollm2-intel-amx-2cpu", "gauge is off by"),
    ],
)
def test_tables_of_published_results_are_only_printed(
    command: Any, file: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: a report and plots that are written beside the results."""
    copy = tmp_path / f"{file}.jsonl"
    copy.write_bytes((RESULTS / copy.name).read_bytes())
    assert command.main(["--table", "--out", str(copy)]) == 0
    assert text in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [copy]
    assert copy.read_bytes() == (RESULTS / copy.name).read_bytes()


@pytest.mark.parametrize(
    ("command", "file", "name"),
    [
        (sweep_methods, "trace-smollm2-intel-amx-2cpu", "aerie bench trace"),
        (trace_methods, "headline-smollm2-intel-amx-2cpu", "aerie bench sweep"),
    ],
)
def test_results_of_another_command_have_no_table(
    command: Any, file: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--table", "--out", str(RESULTS / f"{file}.jsonl")]) == 1
    assert f"has the results of `{name}" in capsys.readouterr().err


def test_work_takes_prompts_around_the_end() -> None:
    from bench.workloads.prompt import Prompt

    work = Work([Prompt(text=str(i)) for i in range(3)], "m", 4, ignore_eos=False)
    jobs = work.jobs(2, 3)
    assert [json.loads(job.body)["prompt"] for job in jobs] == ["2", "0", "1"]
    assert "ignore_eos" not in json.loads(jobs[0].body)
