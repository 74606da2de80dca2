"""`aerie bench gpu-check`: everything that has to be seen on a GPU, in parts.

The most valuable part comes first. Each runs in a process of its own, has a time limit, and saves
its results in OUT/NAME.json as they come; if one fails, the others still run. When it has ended
they become a line of OUT/results.jsonl, to which every check adds. Parts for which too little of
--minutes is left are not begun. The table of all parts is printed last.

Without a network: `python3 -m bench.gpu_check --archive FILE`, with the archive that
`make gpu-archive` made. `--device cpu` rehearses the check where there is no GPU, with models and
batches small enough; what a CPU cannot do is listed. docs/gpu-check.md has more.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from app.engine.configuration import cuda
from bench.errors import reports_errors
from bench.gpu_check import offline
from bench.gpu_check.part_report import FAILED, PASSED, SKIPPED, TIMED_OUT, PartReport
from bench.gpu_check.parts import DEVICES, PARTS, Device, Part, chosen
from bench.parser import command_parser
from drafters.markdown import columns

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS, LOG = "results.jsonl", "parts.log"  # in OUT: a line for each part, and their output
LOG_LINES, LOG_BYTES = 200, 100_000  # of a part that did not pass, at most, in its results
MINUTES = 30.0
GRACE_S = 5.0  # between SIGTERM and SIGKILL
REHEARSAL = 2.0  # a part's limit on a CPU, which others may use too, over that on a GPU
# Engines run in the part's own process, which looks inside of them, and fetch nothing. Their log
# says what took the time.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}


@reports_errors("aerie bench")
def main(argv: Sequence[str]) -> int:
    """Run the parts and print the tables; returns the exit code, 1 if a part failed."""
    args = _parser().parse_args(argv)
    parts = chosen(args.parts)
    if args.device == "cuda" and not has_gpu():
        raise RuntimeError(
            "no NVIDIA GPU on this machine: nvidia-smi lists none. `--device cpu` rehearses"
        )
    if args.archive is not None:
        site = offline.unpack(args.archive, args.site or args.archive.parent / "site")
        offline.register(REPOSITORY, site)
        rest = offline.without_archive(argv)
        line = [sys.executable, "-m", "bench.gpu_check", *rest]
        os.chdir(REPOSITORY)
        os.execve(sys.executable, line, offline.environment(os.environ, site, REPOSITORY))
    out: Path = args.out.resolve()
    with ends_by_sigterm():
        reports = run(parts, args.device, out, 60 * args.minutes)
    print("\n".join(summary(reports)))
    return int(any(r.document["status"] in (FAILED, TIMED_OUT) for r in reports))


@contextmanager
def ends_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end this process by way of SystemExit, so that `finally` blocks run."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def has_gpu() -> bool:
    """Whether NVIDIA's driver lists a GPU."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False)
    except OSError:
        return False
    return listed.returncode == 0 and bool(listed.stdout.strip())


def environment(device: Device, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a part. On a GPU it asks for vLLM's V2 model runner, and for no kernel
    that would have to be compiled where there is no nvcc, as a start of the gateway does."""
    on_gpu = {**V2, **cuda.environment(environ)} if device == "cuda" else {}
    return {**environ, **ENVIRONMENT, **on_gpu}


def command(part: Part, device: Device, file: Path) -> list[str]:
    """The command line of a part's process."""
    line = [sys.executable, "-m", "bench.gpu_check.part", part.name, "--device", device]
    return [*line, "--file", str(file)]


def run(
    parts: Sequence[Part],
    device: Device,
    out: Path,
    seconds: float,
    command: Callable[[Part, Device, Path], list[str]] = command,
    clock: Callable[[], float] = time.monotonic,
) -> list[PartReport]:
    """Run `parts` one after the other, within `seconds`; returns their reports. `command` gives
    the command line of a part."""
    end, reports = clock() + seconds, []
    for part in parts:
        file = out / f"{part.name}.json"
        file.unlink(missing_ok=True)  # of an earlier check that was killed
        left = end - clock()
        if left < part.least_s:
            report = PartReport(file, part.name, device)
            report.end(SKIPPED, 0.0, f"{left:.0f} s were left, it needs {part.least_s:.0f}")
        else:
            limit = part.limit_s * (REHEARSAL if device == "cpu" else 1.0)
            line = command(part, device, file)
            report = _run_one(part, device, file, line, out / LOG, min(limit, left), clock)
        _append(out / RESULTS, report.document)
        file.unlink()
        reports.append(report)
        document = report.document
        _tell(f"{part.name}: {document['status']}, {document['seconds']:.0f} s {document['says']}")
    _append(out / RESULTS, {"summary": summary(reports)})
    return reports


def _append(file: Path, entry: Mapping[str, Any]) -> None:
    """Add a line of JSON to a file of results."""
    with file.open("a", encoding="utf-8") as results:
        results.write(json.dumps(entry) + "\n")


def _run_one(
    part: Part,
    device: Device,
    file: Path,
    line: Sequence[str],
    log: Path,
    limit: float,
    clock: Callable[[], float],
) -> PartReport:
    log.parent.mkdir(parents=True, exist_ok=True)
    begun = clock()
    _tell(f"{part.name}: {part.purpose}, {limit:.0f} s at most")
    with log.open("ab") as output:
        output.write(f"== {part.name}\n".encode())
        output.flush()
        before = output.tell()
        child = subprocess.Popen(
            line, cwd=REPOSITORY, env=environment(device, os.environ), stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, process_group=0,
        )  # fmt: skip
        try:
            code: int | None = child.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(child)
    report = PartReport.read(file, part.name, device)
    failures, says = report.document["failures"], ""
    if code is None:
        status, says = TIMED_OUT, f"ended after {limit:.0f} s; {log}"
    elif code or failures:
        status, says = FAILED, f"{failures[0] if failures else f'exit code {code}'}; {log}"
    else:
        status = PASSED
    if status != PASSED:
        report.document["log"] = _tail(log, before)
    report.end(status, clock() - begun, says)
    return report


def _tail(log: Path, start: int) -> list[str]:
    """The last lines of the log from byte `start` on."""
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - LOG_BYTES))
        return file.read().decode(errors="replace").splitlines()[-LOG_LINES:]


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a part's process with all that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        if child.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                child.wait(GRACE_S)


def summary(reports: Sequence[PartReport]) -> list[str]:
    """Lines: the tables of the parts, what was skipped, and the table of all parts."""
    lines: list[str] = []
    skipped: list[str] = []
    rows = [["part", "status", "seconds", "result"]]
    for report in reports:
        document = report.document
        if document["table"]:
            lines += ["", f"## {document['part']}", "", *document["table"]]
        skipped += [f"- {document['part']}: {s['what']}: {s['why']}" for s in document["skipped"]]
        says = document["says"].splitlines()[0] if document["says"] else ""
        rows.append([document["part"], document["status"], f"{document['seconds']:.0f}", says])
    if skipped:
        lines += ["", "Left out, because this device cannot do it:", *skipped]
    return [*lines, "", *columns(rows)]


def _tell(text: str) -> None:
    print(f"gpu-check: {text.strip()}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("gpu-check", __doc__, epilog="parts:\n" + "\n".join(
        f"  {part.name:16}{part.purpose}{'' if part.by_default else ' (only if named)'}"
        for part in PARTS
    ))  # fmt: skip
    add = parser.add_argument
    add("--device", choices=DEVICES, default="cuda", help="[cuda]")
    add("--out", type=Path, default=Path("runs/gpu-check/results"), metavar="DIR",
        help="folder of results [runs/gpu-check/results]")  # fmt: skip
    add("--minutes", type=float, default=MINUTES, help=f"for all parts [{MINUTES:.0f}]")
    add("--parts", default="", metavar="NAME,NAME", help="these parts only")
    add("--archive", type=Path, metavar="FILE", help="packages, for a machine without a network")
    add("--site", type=Path, metavar="DIR",
        help="where they are unpacked [`site` beside the archive]")  # fmt: skip
    return parser
