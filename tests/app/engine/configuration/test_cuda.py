"""What vLLM is told on a GPU machine, with a CUDA compiler and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.engine.configuration.cuda import (
    asks_for_compatibility,
    c_compiler,
    compatibility_folder,
    environment,
    nvcc,
)


def toolkit(folder: Path) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "nvcc").touch(mode=0o755)
    return folder


def test_the_compiler_is_looked_for_where_flashinfer_looks(tmp_path: Path) -> None:
    default, other = str(toolkit(tmp_path / "cuda")), toolkit(tmp_path / "other")
    empty = str(tmp_path)
    assert nvcc({"PATH": empty}, default) == f"{default}/bin/nvcc"
    assert nvcc({"PATH": f"{other}/bin"}, default) == f"{other}/bin/nvcc"
    for name in ("CUDA_HOME", "CUDA_PATH"):
        assert nvcc({"PATH": empty, name: str(other)}, default) == f"{other}/bin/nvcc"
        # A toolkit that is named is the only one, as it is to FlashInfer.
        assert nvcc({"PATH": f"{other}/bin", name: empty}, default) is None
    assert nvcc({"PATH": empty}, str(tmp_path / "none")) is None


def test_no_kernel_needs_a_compiler_that_is_not_there(tmp_path: Path) -> None:
    """Catches: a machine with only a driver, whose start failed on every path in the warm-up."""
    bare = {"PATH": str(tmp_path)}
    assert environment(bare, str(tmp_path / "none")) == {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_DEEP_GEMM": "0",
    }
    assert environment(bare, str(toolkit(tmp_path / "cuda"))) == {
        "VLLM_USE_FLASHINFER_SAMPLER": "0"
    }


@pytest.mark.parametrize("name", ["VLLM_USE_FLASHINFER_SAMPLER", "VLLM_USE_DEEP_GEMM"])
def test_the_operator_s_own_values_win(name: str, tmp_path: Path) -> None:
    given = {"PATH": str(tmp_path), name: "1"}
    assert name not in environment(given, str(tmp_path / "none"))


def test_the_c_compiler_is_the_one_triton_would_run(tmp_path: Path) -> None:
    path = str(tmp_path)
    assert c_compiler({"PATH": path}) is None
    for name in ("clang", "gcc"):  # gcc comes first
        (tmp_path / name).touch(mode=0o755)
        assert c_compiler({"PATH": path}) == f"{path}/{name}"
    assert c_compiler({"PATH": path, "CC": "clang"}) == f"{path}/clang"
    assert c_compiler({"PATH": path, "CC": "other"}) is None


@pytest.mark.parametrize(("value", "asked"), [("1", True), (" True ", True), ("0", False)])
def test_forward_compatibility_is_asked_for_as_vllm_reads_it(value: str, asked: bool) -> None:
    assert asks_for_compatibility({"VLLM_ENABLE_CUDA_COMPATIBILITY": value}) is asked
    assert not asks_for_compatibility({})


def test_forward_compatibility_lies_where_vllm_looks(tmp_path: Path) -> None:
    none, default, named = (str(tmp_path / name) for name in ("none", "default", "named"))
    conda = tmp_path / "conda" / "cuda-compat"
    for folder in (default, named, conda):
        Path(folder).mkdir(parents=True)
    name = "VLLM_CUDA_COMPATIBILITY_PATH"
    of_conda = {"CONDA_PREFIX": str(conda.parent)}
    assert compatibility_folder({}, none) is None
    assert compatibility_folder({name: none, "CONDA_PREFIX": none}, none) is None
    assert compatibility_folder({name: none}, default) == default
    assert compatibility_folder(of_conda, default) == str(conda)
    assert compatibility_folder({name: named, **of_conda}, default) == named
