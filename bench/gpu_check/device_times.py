"""Parts that are other benches: `aerie bench device`, `kernels` and `sweep`, with their options."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from bench.gpu_check.part_report import PartReport
from bench.parts.device import START
from bench.sweep.journal import Journal

# On a GPU, and on a CPU: target, and how many requests decode together.
DENSE = {"cuda": "qwen3-8b", "cpu": "toy"}
EXPERTS = {"cuda": "qwen3-coder-30b@6", "cpu": "toy-moe"}
BATCHES = {"cuda": "1,8,64", "cpu": "1,8"}


def mixture(report: PartReport) -> None:
    """A target with experts and a P-EAGLE head: that it starts, and its step times."""
    _device(report, "off,k:3,k:7", EXPERTS)


def p_eagle(report: PartReport) -> None:
    """Step times of our engine with a P-EAGLE head."""
    _device(report, "off,k:3,k:7", DENSE)


def eagle3(report: PartReport) -> None:
    """Step times of our engine with an EAGLE-3 head."""
    _device(report, "ours-eagle3:off,ours-eagle3:3,ours-eagle3:7", DENSE)


def vllm(report: PartReport) -> None:
    """Step times of vLLM's own engine, with its EAGLE-3 and without a head."""
    if report.on_cpu:
        report.skip("vLLM's own EAGLE-3", "its CPU kernels have no synthetic acceptance")
        _device(report, "none", DENSE)
    else:
        _device(report, "eagle3:3,none,eagle3:7", DENSE)


def kernels(report: PartReport) -> None:
    """Times of the drafting path's kernels."""
    line = ["kernels", "--device", report.device, *(["--quick"] if report.on_cpu else [])]
    _bench_with_lines(report, line)


def sweep(report: PartReport) -> None:
    """Methods against load, adaptive K among them, beside vLLM's own server."""
    methods = "none,plain,off,k:3,k:5,k:7,adaptive"
    if not report.on_cpu:
        methods = f"none,eagle3:3,vllm:3,vllm:7,{methods.removeprefix('none,')}"
    line = ["sweep", "--model-free", DENSE[report.device], "--methods", methods]
    line += ["--concurrency", "1,8" if report.on_cpu else "1,8,32,128"]
    _bench_with_lines(report, line)


def _bench_with_lines(report: PartReport, line: list[str]) -> None:
    """Run a bench; the lines of its file of results are in the report, also if it fails."""
    file = report.folder / "results.jsonl"
    try:
        report.show(_bench([*line, "--out", str(file)]), "see the table")
    finally:
        if file.exists():
            report.add(lines=file.read_text("utf-8").splitlines())


def _device(report: PartReport, methods: str, architecture: dict[str, str]) -> None:
    """Run `aerie bench device`; what it has written is in the report, also if it fails."""
    if report.on_cpu:
        report.skip("compilation and CUDA graphs", "a CPU has another compiler and no graphs")
    file = report.folder / "device.jsonl"
    line = ["device", "--model-free", architecture[report.device], "--methods", methods]
    line += ["--batch", BATCHES[report.device], "--out", str(file)]
    if report.on_cpu:
        line += ["--set", "enforce_eager=true"]
    try:
        report.show(_bench(line))
    finally:
        if file.exists():
            _copy(report, Journal(file))


def _copy(report: PartReport, journal: Journal) -> None:
    cells = {key: cell for key, cell in journal.cells.items() if key[0] != START}
    starts = {key[1]: cell for key, cell in journal.cells.items() if key[0] == START}
    report.add(
        starts=starts,
        cells=[{"method": key[0], "batch": key[1], **cell} for key, cell in cells.items()],
    )
    unmeasured = [key for key, cell in cells.items() if "step_ms" not in cell]
    for method, batch in unmeasured:
        report.fail(f"{method} with {batch} requests had too few steady steps")
    said = [f"{server} on {start['runner']}, {start['graphs']} graphs"
            for server, start in starts.items()]  # fmt: skip
    report.show([], "; ".join(said))


def _bench(line: Sequence[str]) -> list[str]:
    """The lines that `aerie bench` prints. Raises CalledProcessError if it fails."""
    ended = subprocess.run(
        [sys.executable, "-m", "app.cli", "bench", *line],
        env=os.environ, stdout=subprocess.PIPE, check=True, text=True,
    )  # fmt: skip
    return ended.stdout.splitlines()
