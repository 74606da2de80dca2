"""Run a script with engines in a process of its own: a job goes in, its results come back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def marks() -> list[pytest.MarkDecorator]:
    """For a module that runs such jobs; without vLLM the module is skipped."""
    platforms = pytest.importorskip("vllm.platforms", reason="vllm is not installed")
    on_cpu = platforms.current_platform.is_cpu()
    return [
        pytest.mark.slow,
        pytest.mark.timeout(1800),  # the job has a limit of its own, which says what it was for
        pytest.mark.skipif(not on_cpu, reason="drives vLLM's CPU build"),
    ]


def run(script: Path, folder: Path, job: dict[str, Any], *, timeout: float) -> dict[str, Any]:
    """`script JOB RESULT` with files in `folder`; returns the result, or fails with its stderr.

    `timeout` in seconds.
    """
    (folder / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, str(script), str(folder / "job.json"), str(folder / "result.json")],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result
