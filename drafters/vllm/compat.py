"""Corrections of vLLM 0.32.0 itself, each with the fault it mends. Nothing else patches vLLM."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import vllm

VLLM_VERSION = "0.32.0"


def apply() -> None:
    """Apply every correction once. Raises RuntimeError on any other vLLM."""
    if not vllm.__version__.startswith(VLLM_VERSION):
        raise RuntimeError(f"vllm {vllm.__version__} found, made for {VLLM_VERSION}")
    load = torch.compiler.load_compiled_function
    if not hasattr(load, "__wrapped__"):
        torch.compiler.load_compiled_function = _loads_on_cpu(load)  # type: ignore[assignment]


def _loads_on_cpu(load: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled models saved by the CPU backend cannot be loaded again, so that every start
    compiles: after loading, vLLM calls `finalize_loading` (vllm/compilation/decorators.py,
    _try_load_aot_compiled_fn), which only its own GPU compiler's artefacts have. On CPU the
    artefact is inductor's plain function, complete as loaded.
    """

    @wraps(load)
    def load_and_complete(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        compiled = loaded._artifacts.compiled_fn
        if not hasattr(compiled, "finalize_loading"):
            compiled.finalize_loading = lambda _config: None
        return loaded

    return load_and_complete
