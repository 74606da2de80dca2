"""The worker: whichever model runner vLLM would make, ours is a subclass of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]

# On the platform that is asked for, for each value of VLLM_USE_V2_MODEL_RUNNER (or "unset"): the
# workers of configurations with the attributes that they read when they make the runner. The
# runners' own constructors need devices.
WORKER = """
import os, sys
from types import SimpleNamespace
from unittest.mock import patch
from vllm.platforms import current_platform
on_cpu = sys.argv[1] == "cpu"
with patch.object(type(current_platform), "is_cpu", lambda self: on_cpu):
    from vllm.config import VllmConfig, vllm as configuration
    from drafters.vllm import patches
    patches.apply()
    import torch
    corrected = hasattr(torch.compiler.load_compiled_function, "__wrapped__")
    print("loads saved models of a CPU's compiler:", corrected)
    from drafters.vllm.worker import DraftingWorker
    from drafters.vllm.v1.runner import V1DraftingRunner
    from drafters.vllm.v2.runner import V2DraftingRunner
    build = lambda self, *_: None
    for variable in sys.argv[2:]:
        os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
        if variable != "unset":
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = variable
        configuration.HAS_TRITON = variable == "1" or not on_cpu
        plain, p_eagle = VllmConfig(), VllmConfig()
        p_eagle.speculative_config = SimpleNamespace(
            method="eagle3", parallel_drafting=True, use_eagle=lambda: True
        )
        for config in (plain, p_eagle):
            worker = object.__new__(DraftingWorker)
            worker.use_v2_model_runner = config.use_v2_model_runner
            worker.vllm_config, worker.device = config, None
            with patch.object(V1DraftingRunner, "__init__", build), \\
                    patch.object(V2DraftingRunner, "__init__", build):
                made = worker._make_model_runner()
            names = [kind.__module__ + "." + kind.__name__ for kind in type(made).__mro__[1:3]]
            print("made", *names)
"""
RUNNERS = {
    ("cpu", "V1"): "vllm.v1.worker.cpu_model_runner.CPUModelRunner",
    ("cpu", "V2"): "vllm.v1.worker.cpu.model_runner.CPUModelRunner",
    ("gpu", "V1"): "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    ("gpu", "V2"): "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
}
# Platform -> the variable's value -> the runners without a head and with a P-EAGLE head.
CHOICES = {
    "gpu": {"unset": ("V2", "V1"), "0": ("V1", "V1"), "1": ("V2", "V2")},
    "cpu": {"unset": ("V1", "V1"), "1": ("V2", "V2")},
}


@pytest.mark.slow
@pytest.mark.parametrize("platform", CHOICES)
def test_every_runner_that_vllm_chooses_is_ours(platform: str) -> None:
    """The fault: vLLM chooses the runner that ours does not replace, so that nobody sees NaN."""
    pytest.importorskip("triton")
    choices = CHOICES[platform]
    done = subprocess.run(
        [sys.executable, "-c", WORKER, platform, *choices],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"loads saved models of a CPU's compiler: {platform == 'cpu'}" in done.stdout
    made = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("made")]
    assert made == [
        [f"drafters.vllm.{runner.lower()}.runner.{runner}DraftingRunner", RUNNERS[platform, runner]]
        for runners in choices.values()
        for runner in runners
    ]
