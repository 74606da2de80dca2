"""GPUs as nvidia-smi lists them, those that CUDA shows, and what doctor and a start say of them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from app.doctor import examination, gpus, machine_facts
from app.doctor.gpus import GpuDevice
from app.doctor.machine import check_free_gpu_memory
from app.doctor.report import Finding
from app.presets.about import About, KvLayers, TargetFacts
from app.settings import load

T4, H200 = "Tesla T4, 15360, 14900", "NVIDIA H200, 143771, 143200"
GB10 = "NVIDIA GB10, [N/A], [N/A]"

ABOUT = About(
    target=TargetFacts(
        parameters_b=0.2,
        hidden_size=64,
        max_length=2048,
        kv=(KvLayers(layers=2, heads=2, head_dim=32),),
    )
)


def lines(
    *devices: str, mig: str = "Disabled", driver: str = "580.95.05", capability: str = ", 9.0"
) -> str:
    """What the driver answers to `gpus.query`, for devices of (name, memory, free memory)."""
    return "".join(
        f"{index}, GPU-{index}a{index}b-77, {device}, {mig}, {driver}{capability}\n"
        for index, device in enumerate(devices)
    )


def test_the_driver_s_lines_are_read() -> None:
    found = gpus.read(lines(H200, GB10) + "\nNo devices were found\n")
    assert found == [
        gpus.GpuDevice(
            "0",
            "GPU-0a0b-77",
            "NVIDIA H200",
            gib=143771 / 1024,
            driver="580.95.05",
            capability=9.0,
            free_gib=143200 / 1024,
        ),
        # Of the host's memory: it has no figure of its own, and is a GPU all the same.
        gpus.GpuDevice("1", "GPU-1a1b-77", "NVIDIA GB10", None, "580.95.05", 9.0),
    ]
    assert gpus.memory(found[:1]) == [143771 / 1024] and gpus.memory(found) == []
    assert gpus.description(found) == "NVIDIA H200 and NVIDIA GB10"
    assert gpus.description(found[:1] * 2) == "2 x NVIDIA H200"
    assert gpus.description([]) is None
    assert gpus.read("0, GPU-1, Made, up, 1024, 1000, [N/A], 580.1, [N/A]\n")[0].name == "Made, up"


def test_of_a_gpu_that_is_cut_into_slices_the_memory_is_not_known() -> None:
    (found,) = gpus.read(lines(H200, mig="Enabled"))
    assert found.name == "NVIDIA H200" and found.gib is None and found.free_gib is None


@pytest.mark.parametrize(
    ("listed", "shown"),
    [
        (None, "012"),
        ("2,0", "20"),
        (" 1 , 2", "12"),
        ("GPU-1a1b-77", "1"),
        ("GPU-2a,GPU-0", "20"),
        ("1,GPU-2", "12"),
        # CUDA's own rules: a list ends at what it does not know, and names each GPU once.
        ("1,7,2", "1"),
        ("GPU-", ""),  # the beginning of several
        ("GPU-9", ""),
        ("-1", ""),
        ("", ""),
        ("NoDevFiles", ""),
        ("1,1", ""),
    ],
)
def test_cuda_shows_what_its_variable_names(listed: str | None, shown: str) -> None:
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    found = gpus.visible(gpus.read(lines(T4, H200, H200)), environ)
    assert "".join(gpu.number for gpu in found) == shown


def test_a_slice_is_a_gpu_of_unknown_memory() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "MIG-4c7b,MIG-GPU-0a0b-77/1/0"}
    found = gpus.visible(gpus.read(lines(H200)), environ)
    assert [gpu.gib for gpu in found] == [None, None]
    assert gpus.description(found) == "2 x MIG slice"
    assert gpus.visible([], environ) == []


@pytest.mark.parametrize(
    ("environ", "certain"),
    [
        ({}, False),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1"}, True),
        # Index 1 is that of the slower GPU to CUDA, and of the second on the bus to the driver.
        ({"CUDA_VISIBLE_DEVICES": "1"}, False),
        ({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, True),
    ],
)
def test_among_unequal_gpus_an_index_does_not_say_which(
    environ: dict[str, str], certain: bool
) -> None:
    assert gpus.is_certain(gpus.read(lines(T4, H200)), environ) is certain
    assert gpus.is_certain(gpus.read(lines(H200, H200)), environ) is True


Doctor = Callable[..., list[Finding]]


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Doctor's findings, or a start's, on a machine with vLLM's CUDA build and given GPUs."""

    def examine(
        *devices: str, start: bool = False, size: str = "1", port: str = "0", **options: str
    ) -> list[Finding]:
        done = SimpleNamespace(stdout=lines(*devices, **options))
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
        versions = {"vllm": "0.32.0", "torch": "2.13.0"}
        monkeypatch.setattr(machine_facts, "version_of", versions.get)
        given = {"port": port, "tensor_parallel_size": size}
        settings = load(given, {}, preset="qwen3-8b")
        check = examination.check_start if start else examination.examine
        return check(settings, preset="qwen3-8b")

    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    return examine


def of(findings: list[Finding], check: str) -> Finding | None:
    return next((finding for finding in findings if finding.check == check), None)


@pytest.mark.parametrize("start", [False, True])
def test_unequal_gpus_are_a_warning_until_one_is_named(
    start: bool, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a start refused for the smallest GPU of the machine, whichever was named."""
    found = of(doctor(T4, H200, start=start), "gpu memory")
    assert found is not None and found.status == "warn"
    assert found.remedy is not None and "140.4 GiB by UUID" in found.remedy
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1a1b")
    found = of(doctor(T4, H200, start=start), "gpu memory")
    assert found is not None and found.status == "ok"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-0a0b")
    found = of(doctor(T4, H200, start=start), "gpu memory")
    assert found is not None and found.status == "FAIL"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    found = of(doctor(T4, "Tesla P4, 7680, 7600", start=start), "gpu memory")
    assert found is not None and found.status == "FAIL", "it fits neither"


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize(
    ("listed", "order", "status"),
    [
        ("0", None, "warn"),  # to CUDA the H200
        ("1", None, "warn"),
        ("1,0", None, "warn"),
        ("0", "PCI_BUS_ID", "FAIL"),
        ("1", "PCI_BUS_ID", "ok"),
        ("7", None, None),  # CUDA shows none, which another finding tells
    ],
)
def test_an_index_among_unequal_gpus_is_judged_by_all_of_them(
    start: bool,
    listed: str,
    order: str | None,
    status: str | None,
    doctor: Doctor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: a start refused for the GPU that the driver numbers so, and CUDA does not."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    if order is not None:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    finding = of(doctor(T4, H200, start=start), "gpu memory")
    assert (finding.status if finding else None) == status


def test_a_pair_wants_as_many_gpus_as_cuda_shows(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: the machine's GPUs counted, where the memory of all of them is judged."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    finding = of(doctor(T4, H200, size="2"), "gpu memory")
    assert finding is not None
    assert (finding.status, finding.detail) == ("FAIL", "2 GPUs asked for, 1 found")
    device = of(doctor(T4, H200), "device")
    assert device is not None and device.detail == "CUDA: 1 of Tesla T4 and NVIDIA H200"


@pytest.mark.parametrize("start", [False, True])
def test_a_host_with_little_memory_serves_on_its_gpu(
    start: bool, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: doctor failed for memory that a start does not need, and does not ask for."""
    monkeypatch.setattr(examination, "free_memory", lambda: 2**30)
    findings = doctor(H200, start=start)
    assert of(findings, "memory") is None
    found = of(findings, "gpu memory")
    assert found is not None and found.status == "ok"


def test_a_gpu_that_shares_the_host_s_memory_is_found(doctor: Doctor) -> None:
    findings = doctor(GB10)
    assert of(findings, "device") == Finding("device", "ok", "CUDA: NVIDIA GB10")
    assert of(findings, "gpu memory") is None, "of its memory nothing is known"


def test_doctor_looks_at_driver_and_compilers(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("CUDA_HOME", "/no/such/toolkit")
    findings = doctor(H200, driver="550.54.15")
    status = {finding.check: finding.status for finding in findings}
    assert (status["driver"], status["compiler"], status["nvcc"]) == ("warn", "FAIL", "ok")
    monkeypatch.setenv("VLLM_ENABLE_CUDA_COMPATIBILITY", "1")
    monkeypatch.setattr(examination.cuda, "compatibility_folder", lambda _: None)
    found = of(doctor(H200, driver="550.54.15"), "driver")
    assert found is not None and found.status == "FAIL"
    assert found.remedy is not None and "cuda-compat-13-0" in found.remedy
    line = of(findings, "nvcc")
    assert line is not None and line.detail.startswith("none, ninja ")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = of(doctor(H200), "device")
    assert found is not None and "shows none of 1 GPUs" in found.detail


def test_a_gpu_that_cuda_no_longer_supports_fails(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: doctor passed a V100, on which the first kernel ended the start."""
    found = of(doctor("Tesla V100-SXM2-16GB, 16384, 16100", capability=", 7.0"), "capability")
    assert found is not None and found.status == "FAIL"
    assert found.remedy == "make install BACKEND=cpu"
    found = of(doctor(T4, capability=", 7.5"), "capability")
    assert found is not None and found.status == "ok"
    old = GpuDevice("0", "GPU-0", "GTX 1080", 8.0, "580.1", 6.1)
    new = GpuDevice("1", "GPU-1", "RTX 4090", 24.0, "580.1", 8.9)
    monkeypatch.setattr(machine_facts, "gpu_devices", lambda: [old, new])
    findings = examination.examine(load({"port": "0"}, {}))
    found = of(findings, "capability")
    assert found is not None and found.status == "warn"


HALF = "NVIDIA H200, 143771, 71885"  # 70.2 GiB free


def test_a_gpu_that_another_process_holds_fails(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: doctor passed it, and vLLM refused the start."""
    found = of(doctor(HALF), "free gpu memory")
    assert found is not None and found.status == "FAIL"
    assert found.detail == "GPU 0 has 70.2 of 140.4 GiB free, the engine wants 129.2"
    assert of(doctor(HALF, start=True), "free gpu memory") is None, "vLLM says it at once"
    for devices, size, status in [
        ((H200, HALF), "1", "ok"),
        ((H200, HALF), "2", "FAIL"),
        ((T4, HALF), "1", "warn"),  # which of them the engine takes is not known
        ((GB10,), "1", None),
    ]:
        found = of(doctor(*devices, size=size), "free gpu memory")
        assert (found.status if found else None) == status, devices
    running = {"phase": "ready", "path": {"name": "v2", "reason": "none"}}
    monkeypatch.setattr(examination.start_path, "running", lambda *_: running)
    assert of(doctor(HALF, port="8000"), "free gpu memory") is None, "the gateway's own engine"


def test_beside_a_given_kv_cache_the_sum_must_be_free() -> None:
    def status(free: float, **values: Any) -> str | None:
        settings = load({"model": "a/b", "k": "0", **values}, {})
        gpu = GpuDevice("0", "GPU-0", "H200", 140.0, "580.1", 9.0, free)
        found = check_free_gpu_memory(settings, ABOUT, [gpu])
        return found and found.status

    sized = {"kv_cache_gib": "1"}
    assert status(70.0) == "FAIL"
    assert status(70.0, **sized) == "ok"
    assert status(70.0, **sized, gpu_memory_utilization="0.6") == "FAIL"
    assert status(3.0, **sized) == "warn"  # its allowances may not be needed
    assert status(1.0, **sized) == "FAIL"
