"""Engines without a server, each in a process of its own, so that a bench can look inside."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from app.engine.configuration import cpu
from app.engine.configuration.options import engine_options
from app.settings import Settings
from drafters.packaged import resolve


def lines(module: str, argv: Sequence[str], environ: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Run `python -m MODULE --offline ...` and yield the lines of JSON that it prints at once.

    Its other lines, vLLM's log, go to standard error: errors only, unless `environ` has another
    level. Raises RuntimeError if it fails.
    """
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", **environ, **cpu.environment(environ)}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    line = [sys.executable, "-m", module, "--offline", *argv]
    with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            for text in child.stdout:
                if text.startswith(b"{"):
                    yield json.loads(text)
                else:
                    print(text.decode(errors="replace"), end="", file=sys.stderr, flush=True)
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        raise RuntimeError(f"an engine ended with code {child.returncode}; its error is above")


def start(settings: Settings) -> Any:
    """A vLLM `LLM` in this process, as the gateway starts its engine with these settings. A
    packaged model is converted if it has not been."""
    from vllm import LLM

    options = engine_options(settings)
    model = resolve(options["model"])
    return LLM(**{**options, "model": model, "served_model_name": None})


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
