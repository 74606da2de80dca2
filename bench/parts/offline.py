"""Engines without a server, each in a process of its own, so that a bench can look inside."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from app.engine.configuration import cpu


def lines(module: str, argv: Sequence[str], environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Run `python -m MODULE --offline ...` and return the lines of JSON that it printed.

    Raises RuntimeError if it fails; its own error is on standard error.
    """
    environment = {**environ, **cpu.environment(environ)}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    line = [sys.executable, "-m", module, "--offline", *argv]
    ended = subprocess.run(line, env=environment, stdout=subprocess.PIPE, check=False)
    if ended.returncode:
        raise RuntimeError(f"an engine ended with code {ended.returncode}; its error is above")
    return [json.loads(text) for text in ended.stdout.splitlines() if text.startswith(b"{")]


def engine_core(llm: Any) -> Any:
    """The engine core of a vLLM `LLM` that runs in this process."""
    return llm.llm_engine.engine_core.engine_core


def model_runner(llm: Any) -> Any:
    """The model runner of a vLLM `LLM` whose engine and model run in this process."""
    return engine_core(llm).model_executor.driver_worker.worker.model_runner


def held_out(count: int) -> list[list[int]]:
    """Prompts that no embedded model was trained on, as token ids that every target has."""
    from drafters.train.embedded import EMBEDDED
    from drafters.train.embedded.tokenizer import load_tokenizer
    from drafters.train.evaluation.workloads import held_out_prompts

    return held_out_prompts(load_tokenizer(EMBEDDED / "target"), count)["code"]
