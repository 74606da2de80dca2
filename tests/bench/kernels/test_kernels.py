"""`aerie bench kernels`: every arm runs, and the table has its time and speed-up."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.drafters.ops.test_kernels import DRIVER, REPOSITORY, run

pytest.importorskip("vllm", reason="vllm is not installed")

# What a GPU runs, and what it must leave behind: half of 3 drafts accepted, 2 tokens entered.
ON_A_GPU = """
import numpy as np, torch
from bench.kernels.inputs import CONTEXT, MASK, fused
given = {
    "tokens": np.arange(2 * 4096, dtype=np.int32).reshape(2, 4096),
    "tables": np.arange(2 * 14, dtype=np.int32).reshape(2, 14),
    "query_start_loc": np.array([0, 4, 8], np.int32),
}
states = [torch.arange(8 * 5.0).view(8, 5) + 100 * tap for tap in range(3)]
ids, positions = torch.zeros(16, dtype=torch.int32), torch.zeros(16, dtype=torch.int64)
buffer = torch.zeros(16, 5)
arm = fused(given, states, torch.full((5,), 0.5), 2, 3, ids, positions, buffer)
arm.call()
at = CONTEXT + torch.arange(6)
assert torch.equal(positions[:12], at.repeat(2))
assert ids[:12].view(2, 6)[:, 2:].eq(MASK).all()
assert ids[:2].tolist() == [CONTEXT + 1, CONTEXT + 2]
assert buffer[:12].view(2, 6, 5)[:, 2:].eq(0.5).all() and not buffer[:2].eq(0.5).any()
assert arm.moved == (2 * 3 * 4 + 4 + 12) * 5 * 4 and arm.on_device
"""

DRAW_ON_A_GPU = """
import torch
from vllm.v1.sample.ops import topk_topp_sampler as ops
ops.apply_top_k_top_p = lambda logits, k, p: ops.apply_top_k_top_p_pytorch(logits, k, p)
from bench.kernels.draw import draw
torch.manual_seed(0)
arms = draw(3, 4, 300, torch.float32, "cpu")
assert list(arms) == ["vllm", "served", "plain"]
drawn = {name: arm.call().tolist() for name, arm in arms.items()}
assert drawn["served"] == drawn["vllm"] != drawn["plain"], drawn
"""


@pytest.mark.slow
def test_a_table_of_arms_beside_vllms(tmp_path: Path) -> None:
    out = tmp_path / "kernels.jsonl"
    told = run(["-m", "app.cli", "bench", "kernels", "--quick", "--rounds", "1",
                "--only", "inputs", "--out", str(out)])  # fmt: skip
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(results) == len(told.splitlines()) - 1 == 7
    for result, line in zip(results, told.splitlines(), strict=False):
        assert set(result["us"]) == {"vllm", "served", "once", "layout"}
        assert min(result["us"].values()) > 0 and result["command"].startswith(
            "aerie bench kernels"
        )
        assert result["mb"]["once"] < result["mb"]["served"] < result["mb"]["vllm"]
        ratio = result["us"]["vllm"] / result["us"]["once"]
        shown = re.search(r"once (\d+) us .*?\(([\d.]+)x\)", line)
        assert shown and float(shown[1]) == pytest.approx(result["us"]["once"], abs=1)
        assert float(shown[2]) == pytest.approx(ratio, rel=0.01)
    assert json.loads(told.splitlines()[-1])["results"][0]["us"] == results[0]["us"]


def test_drafts_are_drawn_as_vllm_draws_tokens() -> None:
    pytest.importorskip("triton")
    path = f"{DRIVER}{os.pathsep}{REPOSITORY}"
    run(["-c", DRAW_ON_A_GPU], TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="", PYTHONPATH=path)


def test_the_arm_of_a_gpu_enters_what_was_accepted() -> None:
    pytest.importorskip("triton")
    run(["-c", ON_A_GPU], TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
