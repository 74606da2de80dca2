"""Parts that are tests: they run with pytest, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from bench.gpu_check.part_report import PartReport

REPOSITORY = Path(__file__).resolve().parents[2]


def kernels(report: PartReport) -> None:
    """Our Triton kernels against their references and vLLM's sampler; on a CPU those of the inputs
    and of the selector, in Triton's interpreter."""
    tests = [f"tests/drafters/ops/{name}.py" for name in ("kernels", "selector_kernels")]
    if report.on_cpu:
        report.skip("kernels as compiled code", "Triton's interpreter runs them instead")
    else:
        tests.append("tests/drafters/vllm/v2/draft_sampling_cases.py")
    _run(report, *tests, interpreted=report.on_cpu)


def drafts_in_float32(report: PartReport) -> None:
    """Drafts in float32 with another K at every step (attention is Triton's)."""
    _run(report, "tests/drafters/vllm/v2/test_v2.py", interpreted=False)


def _run(report: PartReport, *tests: str, interpreted: bool) -> None:
    """Run files of tests without the project's configuration, whose plugins may be missing."""
    results = report.folder / "junit.xml"
    line = [sys.executable, "-m", "pytest", "-q", "-rs", "-c", os.devnull, "-p", "no:cacheprovider",
            "--rootdir", str(REPOSITORY), "--import-mode", "importlib", f"--junitxml={results}",
            *tests]  # fmt: skip
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if interpreted else {})}
    ended = subprocess.run(line, cwd=REPOSITORY, env=environment, check=False)
    if not results.exists():
        raise RuntimeError(f"pytest ended with code {ended.returncode} and no results")
    counts: dict[str, int] = dict.fromkeys(("passed", "failed", "skipped"), 0)
    for case in ElementTree.parse(results).iter("testcase"):
        name = case.attrib["name"]
        if (skipped := case.find("skipped")) is not None:
            counts["skipped"] += 1
            report.skip(name, skipped.attrib.get("message", ""))
        elif case.find("failure") is not None or case.find("error") is not None:
            counts["failed"] += 1
            report.fail(f"{name} failed")
        else:
            counts["passed"] += 1
    report.add(**counts)
    report.show([], ", ".join(f"{n} {name}" for name, n in counts.items()))
    if ended.returncode or not counts["passed"]:
        raise RuntimeError(f"pytest ended with code {ended.returncode}, {counts['passed']} passed")
