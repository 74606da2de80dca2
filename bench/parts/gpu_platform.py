"""A GPU that is not there, for building vLLM's configuration as on a machine that has one.

vLLM asks its platform for a GPU's name, memory, compute capability and number. `pretend` puts a
platform of given facts in its place, before anything else of vLLM is imported. What vLLM's wheel
for CUDA has compiled and a wheel for CPUs lacks is there by name only, so that it can be imported
and asked what it supports: no kernel can run. Whatever vLLM decides from that is its own decision.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

GIB = 1024**3
COMPILED = (
    "vllm._C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
FLASHINFER = ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils")
HAS_KERNELS = "VLLM_HAS_FLASHINFER_CUBIN"  # vLLM's variable: FlashInfer's kernels are compiled
# What vllm/_custom_ops.py asks of the compiled library while it is imported.
SUPPORTED = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_group_gemm_supported",
)
# Kernels that vLLM's fusion passes name while they are imported.
KERNELS = (
    "rotary_embedding",
    "silu_and_mul",
    "fused_add_rms_norm",
    "static_scaled_fp8_quant",
    "dynamic_scaled_fp8_quant",
    "dynamic_per_token_scaled_fp8_quant",
    "rms_norm_static_fp8_quant",
    "fused_add_rms_norm_static_fp8_quant",
    "rms_norm_dynamic_per_token_quant",
)


class Gpu(NamedTuple):
    """Facts about a kind of GPU, as its driver reports them."""

    name: str
    gib: float
    capability: tuple[int, int]


GPUS = {
    "H100": Gpu("NVIDIA H100 80GB HBM3", 79.6, (9, 0)),
    "H200": Gpu("NVIDIA H200", 140.4, (9, 0)),
    "B200": Gpu("NVIDIA B200", 179.1, (10, 0)),
    "A100": Gpu("NVIDIA A100-SXM4-80GB", 79.3, (8, 0)),
    "L40S": Gpu("NVIDIA L40S", 45.0, (8, 9)),
}


class _Named(ModuleType):
    """A module in which every name is a class without contents."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def pretend(gpu: Gpu, count: int = 8, *, flashinfer: bool = False) -> None:
    """Make this process build configurations as on a machine with `count` such GPUs.

    `flashinfer` is whether FlashInfer's kernels can be used there: compiled ones are installed, or
    an nvcc. This project's own installation has neither.

    The first call comes before vLLM is imported: a process cannot go back to its own platform. A
    later one changes the GPUs, for what vLLM has not asked about yet.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(count)))
    os.environ["CUDA_HOME"] = os.devnull  # without nvcc
    os.environ[HAS_KERNELS] = str(int(flashinfer))
    if not _libraries:
        _stand_in_for_cuda()
    if (asked := sys.modules.get("vllm.utils.flashinfer")) is not None:
        asked.has_flashinfer.cache_clear()
        asked.has_flashinfer_cubin.cache_clear()
    if not flashinfer:  # what was imported while there was a stand-in for it
        sys.modules.pop("vllm.v1.attention.backends.flashinfer", None)

    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class PretendedPlatform(CudaPlatformBase):
        """vLLM's CUDA platform, with the facts of `gpu`."""

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*gpu.capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return gpu.name

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return int(gpu.gib * GIB)

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return True

        @classmethod
        def device_count(cls) -> int:
            return count

        @classmethod
        def graph_pool_handle(cls) -> Any:
            return (0, 0)

    # Modules that were imported meanwhile hold the first platform itself.
    if isinstance(first := vllm.platforms._current_platform, CudaPlatformBase):
        first.__class__ = PretendedPlatform
    else:
        vllm.platforms._current_platform = PretendedPlatform()
        from vllm.vllm_flash_attn import flash_attn_interface

        # Python files beside the compiled ones, which a wheel for CPUs lacks.
        flash_attn_interface.FA4_AVAILABLE = True


def _stand_in_for_cuda() -> None:
    """Put names in the place of what a wheel for CUDA has compiled, and let Triton be found."""
    import torch
    import triton.backends

    # A wheel for CPUs takes Triton only with its CPU backend.
    driver = SimpleNamespace(is_active=lambda: True)
    triton.backends.backends["cpu"] = SimpleNamespace(driver=driver)
    library = torch.library.Library("_C", "FRAGMENT")
    for name in SUPPORTED:
        library.define(f"{name}(int capability) -> bool")
        library.impl(name, lambda capability: capability >= 90, "CompositeExplicitAutograd")
    for name in KERNELS:
        library.define(f"{name}() -> ()")
    _libraries.append(library)
    sys.modules.update({name: _Named(name) for name in (*COMPILED, *FLASHINFER)})


_libraries: list[Any] = []  # a library's definitions end with it
