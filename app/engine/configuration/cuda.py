"""Facts about a machine with NVIDIA GPUs, and what vLLM does without a CUDA compiler.

vLLM's kernels and CUDA's libraries come compiled with the wheels. Triton compiles its kernels
itself, and their launcher with a C compiler. FlashInfer and DeepGEMM compile their kernels with
nvcc at first use. The container image and a machine with only a driver have none, and vLLM would
use both there: the start would fail in the warm-up. So no start takes nvcc for granted.

The package nvidia-cuda-nvcc of the lock has an nvcc, in `nvidia/cu13/bin` of the environment, where
only the package that needs it looks.

Standard library only: bench/gpu_check reads this before packages are installed.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

TOOLKIT = "/usr/local/cuda"  # where nvcc is looked for last

# Where the package cuda-compat-13-0 installs CUDA's forward compatibility, for torch's CUDA.
COMPATIBILITY = "/usr/local/cuda-13.0/compat"

# vLLM draws with FlashInfer by default, and asks for no compiler first
# (vllm/v1/sample/ops/topk_topp_sampler.py). Its V2 runner warms that kernel up on every start path.
# It is off with a compiler too: steps with drafts never use it, and a text must not depend on
# whether a step had drafts.
NO_FLASHINFER_SAMPLER = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}

# DeepGEMM comes inside vLLM's wheel. Without nvcc it cannot be imported, but vLLM only asks whether
# its files are there (vllm/utils/deep_gemm.py, is_deep_gemm_supported): FP8 weights fail to load.
NO_DEEP_GEMM = {"VLLM_USE_DEEP_GEMM": "0"}

# vLLM's engine arguments where FlashInfer cannot be used. For layers of gated delta nets vLLM takes
# FlashInfer on Hopper and Blackwell without asking whether it works
# (vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py).
WITHOUT_FLASHINFER = {"gdn_prefill_backend": "triton"}


def nvcc(environ: Mapping[str, str], toolkit: str = TOOLKIT) -> str | None:
    """The path of the CUDA compiler that FlashInfer and DeepGEMM would run, or None."""
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if not home and (path := shutil.which("nvcc", path=environ.get("PATH"))):
        return path
    return shutil.which(str(Path(home or toolkit) / "bin" / "nvcc"))


def c_compiler(environ: Mapping[str, str]) -> str | None:
    """The path of the C compiler that Triton would run (triton/runtime/build.py), or None."""
    path = environ.get("PATH")
    if (compiler := environ.get("CC")) is not None:
        return shutil.which(compiler, path=path)
    return shutil.which("gcc", path=path) or shutil.which("clang", path=path)


def asks_for_compatibility(environ: Mapping[str, str]) -> bool:
    """Whether vLLM is to load CUDA's forward compatibility (vllm/env_override.py)."""
    value = environ.get("VLLM_ENABLE_CUDA_COMPATIBILITY", "")
    return value.strip().lower() in ("1", "true")


def compatibility_folder(environ: Mapping[str, str], default: str = COMPATIBILITY) -> str | None:
    """The folder from which vLLM would load it, or None: then it goes on without a word."""
    conda = environ.get("CONDA_PREFIX")
    folders = (
        environ.get("VLLM_CUDA_COMPATIBILITY_PATH"),
        str(Path(conda, "cuda-compat")) if conda else None,
        default,
    )
    return next((folder for folder in folders if folder and Path(folder).is_dir()), None)


def environment(environ: Mapping[str, str], toolkit: str = TOOLKIT) -> dict[str, str]:
    """Variables for vLLM's processes on GPUs, in addition to `environ`, whose own values win."""
    variables = dict(NO_FLASHINFER_SAMPLER)
    if nvcc(environ, toolkit) is None:
        variables |= NO_DEEP_GEMM
    return {name: value for name, value in variables.items() if name not in environ}
