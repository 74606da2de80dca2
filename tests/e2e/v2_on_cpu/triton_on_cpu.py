"""Triton without a GPU: a driver for the CPU, and an interpreter that prepares itself once."""

from __future__ import annotations

import dataclasses
import os
from types import SimpleNamespace
from typing import Any


def install() -> None:
    """Let Triton be loaded here, so that vLLM's V2 model runner starts, and interpret its kernels
    if TRITON_INTERPRET is 1. Call it before vLLM is imported."""
    import triton.backends

    driver = SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = SimpleNamespace(driver=driver)
    if os.environ.get("TRITON_INTERPRET") == "1":
        _prepare_once()


def _prepare_once() -> None:
    """Keep Triton's language replaced by the interpreter's.

    Triton replaces it at each call of a kernel, and of a function within one, by looking at all of
    its names, which takes longer than most kernels do. Nothing here compiles kernels too.
    """
    from triton.runtime import interpreter

    replace = interpreter._patch_lang
    modules: set[int] = set()  # whose functions have been called

    def replace_once(function: Any) -> Any:
        if id(function.__globals__) not in modules:
            replace(function)
            modules.add(id(function.__globals__))
        return interpreter._LangPatchScope()  # which has nothing to take back

    interpreter._patch_lang = replace_once
    # On a CPU arguments need not be copied to the host, nor what a kernel wrote copied back.
    interpreter.GridExecutor._init_args_hst = lambda _, args, kwargs: (args, kwargs)
    interpreter.GridExecutor._restore_args_dev = lambda *_: None
    # The interpreter would compute of each sum and product whether it overflows, and drop the
    # answer: it asserts nothing unless it debugs.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
