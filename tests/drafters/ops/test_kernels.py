"""The kernels of drafters/ops: run in Triton's interpreter, and compiled for current GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[3]
DRIVER = REPOSITORY / "tests" / "e2e" / "v2_on_cpu"
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from drafters.ops import inputs_triton, selector_triton
INTEGERS = {"rows": "*i64", "tokens": "*i32", "tables": "*i32", "query_start_loc": "*i32",
            "ids": "*i32", "positions": "*i64", "slots": "*i64"}
PLANNED = {**dict.fromkeys(("host_rows", "slots", "positions", "rows", "drafts"), "*i64"),
           **dict.fromkeys(("query_start_loc", "rejected", "tokens", "queries", "lengths"), "*i32")}
def built(kernel, pointers, **constants):
    names = [name for name in kernel.arg_names if name not in constants]
    source = ASTSource(kernel, {name: pointers.get(name, "i32") for name in names}, constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
STEPS = inputs_triton.STEPS
for fresh in (True, False):
    built(inputs_triton.plan_kernel, PLANNED, FRESH=fresh, DRAFTS=inputs_triton.DRAFTS)
for dtype in ("*bf16", "*fp32"):
    wide = dict.fromkeys((*(f"state{tap}" for tap in range(5)), "store", "gathered"), dtype)
    built(inputs_triton.enter_kernel, {**INTEGERS, **wide}, TAPS=5, STEPS=STEPS, COLUMNS=1024)
    wide = dict.fromkeys(("combined", "shared", "out"), dtype)
    built(inputs_triton.spread_kernel, {"rows": "*i64", **wide}, STEPS=STEPS, COLUMNS=1024)
    wide = dict.fromkeys(("top", "projected", "before_table", "candidate_table"), dtype)
    wide |= {"candidates": "*i64", "tokens": "*i64", "scores": "*fp32"}
    built(selector_triton.walk_kernel, wide, COUNT=16, COLUMNS=128)
"""


def run(arguments: list[str], **environ: str) -> str:
    """Python with `arguments`; what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, env={**os.environ, **environ},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    """Every case of kernels.py and selector_kernels.py; what each catches is said there."""
    pytest.importorskip("triton")
    files = [f"tests/drafters/ops/{name}.py" for name in ("kernels", "selector_kernels")]
    run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(DRIVER),
    )  # fmt: skip


def test_they_compile_for_sm_90() -> None:
    """Catches: what the interpreter allows and the compiler does not: types that differ between
    branches, shapes that a tensor core has no instruction for."""
    pytest.importorskip("triton")
    run(["-c", COMPILE], TRITON_INTERPRET="0")


def test_another_k_compiles_no_kernel_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a stall of a second when K first takes a value: what a kernel is compiled for
    follows K or the number of requests."""
    pytest.importorskip("triton")
    from drafters.ops import inputs_triton

    constants: list[dict[str, object]] = []

    class Launched:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *given, **compiled_for: constants.append(compiled_for)

    monkeypatch.setattr(inputs_triton, "plan_kernel", Launched())
    integers: dict[str, Any] = {"dtype": torch.int32}
    for requests, k in ((1, 0), (1, 1), (2, 5), (7, 32)):
        inputs_triton.plan(
            torch.zeros(4, requests, dtype=torch.int64), slots=torch.zeros(requests),
            query_start_loc=torch.zeros(requests + 1, **integers), positions=torch.zeros(9).long(),
            rejected=torch.zeros(requests, **integers), tokens=torch.zeros(8, 40, **integers),
            total=9, max_model_len=40, kept=True,
            rows=torch.zeros(len(inputs_triton.FIELDS), requests, dtype=torch.int64),
            queries=torch.zeros(requests + 1, **integers),
            lengths=torch.zeros(requests, **integers), drafts=torch.zeros(requests, k).long(),
        )  # fmt: skip
    assert len(constants) == 4 and all(compiled_for == constants[0] for compiled_for in constants)
