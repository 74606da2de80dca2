"""The kernel that draws drafts on the V2 runner: run in Triton's interpreter beside vLLM's sampler,
and compiled for current GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[4]
CASES = "tests/drafters/vllm/v2/draft_sampling_cases.py"
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from drafters.vllm.v2.draft_sampling import draw_kernel
del triton.backends.backends["cpu"]  # which cannot compile
TYPES = {"tokens": "*i64", "ids": "*i64", "slots": "*i64", "positions": "*i64", "seeds": "*i64",
         "temperatures": "*fp32", "top_ks": "*i32", "top_ps": "*fp32", "min_ps": "*fp32"}
SIZES = {"COLUMNS": 4096, "BISECTIONS": 12, "DEPTH": 20.0}
for dtype, mapped, wide in (("*bf16", True, False), ("*fp32", False, True)):
    constants = {**SIZES, "USE_FP64": wide, **({} if mapped else {"ids": None})}
    names = [name for name in draw_kernel.arg_names if name not in constants]
    types = {name: {**TYPES, "logits": dtype}.get(name, "i32") for name in names}
    source = ASTSource(draw_kernel, types, constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
"""


def run(arguments: list[str], **environ: str) -> None:
    """Python with `arguments` and a driver that lets vLLM load Triton without a GPU."""
    driver = str(REPOSITORY / "tests" / "e2e" / "v2_on_cpu")
    done = subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=280,
        env={**os.environ, "PYTHONPATH": driver, "CUDA_VISIBLE_DEVICES": "", **environ},
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    """Every case of draft_sampling_cases.py; what each of them catches is said there."""
    run(["-m", "pytest", "-q", "-p", "no:cacheprovider", CASES], TRITON_INTERPRET="1")


def test_it_compiles_for_sm_90() -> None:
    """Catches: what the interpreter allows and the compiler does not: types that differ between
    branches or from one turn of a loop to the next."""
    run(["-c", COMPILE], TRITON_INTERPRET="0")
