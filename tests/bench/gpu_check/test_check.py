"""The order, limits and tables of the check, with parts that are small scripts."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.gpu_check import check
from bench.gpu_check.check import command, environment, main, run, summary
from bench.gpu_check.part_report import PartReport
from bench.gpu_check.parts import PARTS, Part, chosen
from tests.waiting import until

REPORT = "from bench.gpu_check.part_report import PartReport; import os, subprocess, sys, time\n"
REPORT += "from pathlib import Path\nfile = Path(sys.argv[1])\n"
REPORT += "r = PartReport(file, file.stem, 'cpu')\n"
BODIES = {
    "good": "r.add(figure=1); r.show(['a line'], 'all well')",
    "bad": "r.add(figure=2); sys.exit('it broke')",
    "silent": "sys.exit(3)",
    "unsound": "r.fail('one draft is wrong')",
    "endless": "r.add(figure=3, child=subprocess.Popen(['sleep', '99']).pid); time.sleep(99)",
}


def part(name: str, limit: float = 30.0, least: float = 0.0) -> Part:
    return Part(name, "", "", limit, least)


def fake(part: Part, device: str, file: Path) -> list[str]:
    body = BODIES[part.name.rstrip("0123456789")]
    return [sys.executable, "-c", REPORT + body, str(file)]


def saved_in(out: Path) -> dict[str, Any]:
    """The documents in the file of results, by part."""
    lines = map(json.loads, (out / "results.jsonl").read_text().splitlines())
    return {line["part"]: line for line in lines if "part" in line}


def statuses(reports: list[PartReport]) -> dict[str, str]:
    return {r.document["part"]: r.document["status"] for r in reports}


def test_a_failure_stops_no_other_part_and_leaves_its_results(tmp_path: Path) -> None:
    names = ("bad", "silent", "unsound", "good")
    reports = run([part(name) for name in names], "cpu", tmp_path, 60.0, fake)
    assert statuses(reports) == {
        "bad": "failed", "silent": "failed", "unsound": "failed", "good": "passed",
    }  # fmt: skip
    saved = saved_in(tmp_path)
    assert saved["bad"]["results"] == {"figure": 2}
    assert "exit code 1" in saved["bad"]["says"]
    assert "it broke" in saved["bad"]["log"]
    assert saved["silent"]["results"] == {}
    assert saved["unsound"]["says"].startswith("one draft is wrong")
    assert saved["good"]["says"] == "all well"


def test_few_files_come_back_and_hold_everything(tmp_path: Path) -> None:
    """Catches: files of each part, more than a machine without a network gives back."""
    names = [part.name for part in chosen("")]
    run([part(f"good{n}") for n in range(len(names))], "cpu", tmp_path, 60.0, fake)
    run([part("bad")], "cpu", tmp_path, 60.0, fake)
    assert {file.name for file in tmp_path.rglob("*")} == {"results.jsonl", "parts.log"}
    saved = saved_in(tmp_path)
    assert len(saved) == len(names) + 1  # a second check adds to the first
    assert saved["bad"]["log"] == ["it broke"] and "log" not in saved["good0"]
    last = json.loads((tmp_path / "results.jsonl").read_text().splitlines()[-1])
    assert last["summary"][-1].split()[1:4] == ["bad", "|", "failed"]


def test_a_part_that_does_not_end_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is counted here from when it has started what it starts: a busy machine may take
    as long to come so far."""

    class Begun(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            report = tmp_path / "endless.json"
            if "endless" in str(self.args):
                until(lambda: report.exists() and "child" in report.read_text())
            return super().wait(timeout)

    monkeypatch.setattr(check.subprocess, "Popen", Begun)
    begun = time.monotonic()
    reports = run([part("endless", limit=1.5), part("good")], "cpu", tmp_path, 60.0, fake)
    assert time.monotonic() - begun < 30
    assert statuses(reports) == {"endless": "timed out", "good": "passed"}
    results = reports[0].document["results"]
    assert results["figure"] == 3
    with suppress(psutil.NoSuchProcess):  # one that nobody has waited for yet is a zombie
        assert psutil.Process(results["child"]).status() == psutil.STATUS_ZOMBIE


def test_a_check_that_is_ended_ends_the_part_that_runs(tmp_path: Path) -> None:
    """Catches: an engine that holds the GPU after the check was killed."""
    code = "from pathlib import Path\n"
    code += "from tests.bench.gpu_check.test_check import check, fake, part, run\n"
    code += f"with check.ends_by_sigterm(): run([part('endless')], 'cpu', Path({str(tmp_path)!r}),"
    code += " 60.0, fake)"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=check.REPOSITORY)
    report, child = tmp_path / "endless.json", 0
    while not child:
        assert process.poll() is None
        if report.exists():
            child = json.loads(report.read_text())["results"].get("child", 0)
        time.sleep(0.05)
    process.terminate()
    assert process.wait(20) == 143
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_what_no_longer_fits_is_not_begun(tmp_path: Path) -> None:
    """The clock moves only where it is read: 10 s at each reading."""
    now = [0.0]

    def clock() -> float:
        now[0] += 10.0
        return now[0]

    (tmp_path / "good2.json").write_text('{"status": "passed"}')  # of an earlier check
    parts = [part("good1", least=50.0), part("good2", least=50.0), part("good3")]
    reports = run(parts, "cpu", tmp_path, 75.0, fake, clock)
    assert statuses(reports) == {"good1": "passed", "good2": "skipped", "good3": "passed"}
    assert saved_in(tmp_path)["good2"]["says"] == "35 s were left, it needs 50"


def test_the_table_of_all_parts_comes_last(tmp_path: Path) -> None:
    report = PartReport(tmp_path / "a.json", "a", "cpu")
    report.skip("graphs", "a CPU has none")
    report.show(["| figure |"], "fine")
    report.end("passed", 2.0)
    other = PartReport(tmp_path / "b.json", "b", "cpu")
    other.end("failed", 1.0, "broken\nwith details")
    lines = summary([report, other])
    assert lines.index("| figure |") < lines.index("- a: graphs: a CPU has none")
    assert lines[-4].split() == ["|", "part", "|", "status", "|", "seconds", "|", "result", "|"]
    assert lines[-1].split() == ["|", "b", "|", "failed", "|", "1", "|", "broken", "|"]


def test_an_error_of_a_part_is_in_its_report(tmp_path: Path) -> None:
    from bench.gpu_check import part as part_process

    def broken(report: PartReport) -> None:
        report.add(before=True)
        raise ValueError("no such head")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.gpu_check.smoke.run", broken)
        patch.setattr("os.environ", dict(os.environ))
        file = tmp_path / "smoke.json"
        assert part_process.run(["smoke", "--device", "cpu", "--file", str(file)]) == 1
    saved = json.loads(file.read_text())
    assert saved["failures"] == ["ValueError: no such head"]
    assert saved["results"] == {"before": True}
    assert {"commit", "versions", "cpu", "date"} <= set(saved["provenance"])


def test_a_part_that_is_ended_has_the_cells_so_far(tmp_path: Path) -> None:
    """Catches: SIGTERM ends Python before the results of the bench behind the part are copied."""
    file = tmp_path / "mixture.json"
    code = f"""
import sys, time
from pathlib import Path
from bench.gpu_check import device_times, part
from bench.sweep.journal import Journal

def bench(line):
    journal = Journal(Path(line[line.index("--out") + 1]))
    journal.begin({{}}, {{}})
    journal.add(("off", 1), {{"step_ms": 2.5}})
    print("measured", flush=True)
    time.sleep(99)

device_times._bench = bench
sys.exit(part.run(["mixture", "--device", "cpu", "--file", {str(file)!r}]))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=check.REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "measured\n"
    process.terminate()
    assert process.wait(20) == 143
    process.stdout.close()
    saved = json.loads(file.read_text())
    assert saved["results"]["cells"] == [{"method": "off", "batch": 1, "step_ms": 2.5}]


@pytest.mark.parametrize("each", PARTS, ids=lambda part: part.name)
def test_every_part_has_a_body(each: Part, tmp_path: Path) -> None:
    module, _, function = each.body.partition(":")
    body: Any = getattr(importlib.import_module(f"bench.gpu_check.{module}"), function)
    assert callable(body)
    assert each.name in command(each, "cpu", tmp_path / "x.json")
    assert each.least_s <= each.limit_s


def test_the_parts_of_a_check_are_chosen_by_name() -> None:
    assert [part.name for part in chosen("")][:2] == ["smoke", "kernels"]
    assert "sweep" not in {part.name for part in chosen("")}
    assert [part.name for part in chosen("sweep, kernels")] == ["kernels", "sweep"]
    with pytest.raises(ValueError, match="no part 'kernel'"):
        chosen("kernel")


def test_a_gpu_gets_v2_and_nothing_is_fetched() -> None:
    assert environment("cuda", {"A": "b"})["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert environment("cuda", {"A": "b"})["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    given = environment("cpu", {"A": "b"})
    assert given["A"] == "b" and given["HF_HUB_OFFLINE"] == "1"
    assert "VLLM_USE_V2_MODEL_RUNNER" not in given


def test_without_a_gpu_it_says_so_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--out", str(tmp_path / "out")]) == 1
    assert "no NVIDIA GPU on this machine" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "code"), [("good", 0), ("bad", 1), ("endless", 1)])
def test_the_exit_code_says_whether_all_is_well(
    name: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "chosen", lambda names: [part(name, limit=2.0)])
    monkeypatch.setattr(check.run, "__defaults__", (fake, time.monotonic))
    assert main(["--device", "cpu", "--out", str(tmp_path)]) == code
