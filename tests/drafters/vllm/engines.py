"""What the scripts with engines share (engine_*.py), each of which is run in a process of its own:

    python SCRIPT JOB RESULT

JOB is a file of JSON that says what to do, and RESULT becomes one of what came of it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # parts of an engine are watched where they run

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms import current_platform

from drafters.model.config import method_of

if current_platform.is_cpu():
    # Once, where vLLM looks through every name of every module for each engine, a second long.
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = staticmethod(lambda: None)

WORKER = "drafters.vllm.worker.DraftingWorker"
SCHEDULER = "drafters.vllm.scheduling.scheduler.DraftingScheduler"
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
    "enable_prefix_caching": False,
    "skip_tokenizer_init": True,
}


def new_engine(model: str, head: str | None = None, k: int = 0, **options: Any) -> LLM:
    """An engine for a target and a head, folders, with options of vLLM besides. `speculation` among
    them is options of the speculation."""
    speculation = options.pop("speculation", {})
    if head is not None:
        document = json.loads((Path(head) / "config.json").read_text())
        options["speculative_config"] = {
            "method": "eagle3",
            "model": head,
            "num_speculative_tokens": k,
            "parallel_drafting": method_of(document) == "p-eagle",
            **speculation,
        }
    return LLM(model=model, **{**SMALL, **options})


def core_of(engine: LLM) -> Any:
    """The engine core, which runs in this process."""
    return engine.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]


def swap_head(engine: LLM, folder: str) -> list[dict[str, Any]]:
    """Put the head in a folder in force, "" for that of the start: what the engine core answers."""
    return [core_of(engine).aerie_head(command, folder) for command in ("stage", "swap")]


def greedy(tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **options
    )


def generate(engine: LLM, prompts: list[list[int]], sampling: Any) -> list[Any]:
    """vLLM's outputs for prompts of tokens, all in one batch if there is room."""
    given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    return engine.generate(given, sampling, use_tqdm=False)


def texts(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def one_by_one(run: Callable[[Any], Any], engines: dict[str, Any]) -> dict[str, Any]:
    """What `run` makes of each entry. It starts an engine and keeps none: one after the other is
    taken down."""
    results = {}
    for name, engine in engines.items():
        results[name] = run(engine)
        cleanup_dist_env_and_memory()
    return results


def freeze_imports() -> None:
    """Keep what was imported out of garbage collections, for good: an engine's start and end have
    18 of them, of 0.3 s each, and vLLM's `unfreeze` would bring the imported objects back."""
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


def main(run: Callable[[dict[str, Any]], Any]) -> None:
    """Write what `run` makes of the job."""
    freeze_imports()
    job = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(run(job)))
