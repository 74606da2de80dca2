"""Run a script with engines in a process of its own: a job goes in, its results come back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.drafters.preloaded import Preloaded

SCRIPTS = Path(__file__).parent / "vllm"
_preloaded: dict[str, Preloaded] = {}  # by the module that is imported


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
    """`script JOB RESULT` with files in `folder`; returns the result, or fails with its output.

    Scripts whose name ends in _v2, and jobs with a true "v2", run on vLLM's V2 model runner.
    `timeout` in seconds.
    """
    (folder / "job.json").write_text(json.dumps(job))
    arguments = [str(folder / "job.json"), str(folder / "result.json")]
    output = folder / "output.txt"
    environ = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    failure = ""
    try:
        if torch.cuda.is_available():  # CUDA cannot be used in a fork of a process that has used it
            with output.open("w") as file:
                line = [sys.executable, str(script), *arguments]
                subprocess.run(
                    line, env=environ, stdout=file, stderr=file, timeout=timeout, check=True
                )
        else:
            on_v2 = script.stem.endswith("_v2") or job.get("v2", False)
            process = _importing("engine_drafts_v2" if on_v2 else "engine_drafts", environ)
            if code := process.run(script, arguments, output, environ=environ, timeout=timeout):
                failure = f"{script.name} ended with exit code {code}"
    except (subprocess.SubprocessError, TimeoutError, RuntimeError) as error:
        failure = str(error)
    if failure:
        printed = output.read_text()[-4000:] if output.exists() else ""
        pytest.fail(f"{failure}\n{printed}")
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def _importing(module: str, environ: dict[str, str]) -> Preloaded:
    """The process that has imported this module of SCRIPTS, and with it vLLM, which takes 8 s."""
    process = _preloaded.get(module)
    if process is None or not process.alive:
        process = _preloaded[module] = Preloaded(SCRIPTS / f"{module}.py", environ)
    return process
