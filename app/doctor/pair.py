"""Checks of target and draft head, wherever their files are: in a folder, in a package, in the
hub's cache, or at the hub."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from app.doctor import chat_template, hub, machine, machine_facts, models, packaged, report
from app.doctor.report import Finding
from app.engine.configuration.head import WITHOUT_HEAD
from app.presets.about import About, facts_in
from app.settings import Settings, of_preset, preset_names
from drafters.model.weight_files import MissingShardError
from drafters.packaged import is_packaged

Ask = Callable[[str, str | None], models.Checkpoint]  # app.doctor.hub.ask

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
        has_torchvision = machine_facts.version_of("torchvision") is not None
        findings += machine.check_images(read["model"].config, has_torchvision=has_torchvision)
    if not settings.speculates:
        findings.append(report.ok("head", "none: K is 0"))
    elif not settings.has_head:
        left_out = "model" in read and leaves_out_lookups(settings, read["model"])
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


def facts_by_files(
    about: About | None, checkpoints: Mapping[str, models.Checkpoint]
) -> About | None:
    """Facts about target and head: by the files that `check_models` has read, and by `about` where
    it has read none."""
    target = checkpoints.get("model")
    if target is not None and (facts := facts_in(target.text(), target.weights_bytes)):
        about = (about or About()).model_copy(update={"target": facts})
    head = checkpoints.get("head")
    if head is not None and (head_facts := models.head_facts(head)):
        about = (about or About()).model_copy(update={"head": head_facts})
    return about


def leaves_out_lookups(settings: Settings, target: models.Checkpoint) -> bool:
    """Whether the start leaves lookups out, as `_refuse_unasked_lookups` (app/engine/launch.py)
    does it."""
    unasked = not settings.speculation.asks_for_lookups
    offered = settings.speculates and not settings.has_head
    return offered and unasked and models.is_recurrent(target)


def _read(
    kind: str,
    name: str,
    revision: str | None,
    ask: Ask | None,
    read: Callable[[Path], models.Checkpoint],
) -> models.Checkpoint | Finding:
    """A folder, a packaged model, a repository in the hub's cache, or one at the hub. `read` reads
    folders."""
    if kind == "model" and is_packaged(name):
        return packaged.read(name)
    if name.lower().startswith(_OBJECT_STORES):
        return report.warn(
            kind, f"{name}: in an object store, not checked", "nothing, if vLLM can read it"
        )
    folder = Path(name)
    no_hub_id = name.startswith(("/", ".")) or name.count("/") > 1
    try:
        exists = folder.exists()
    except OSError as error:  # in a folder that this user may not read, or too long for a name
        return report.fail(kind, f"{name}: {error.strerror}", f"check --{_OPTION[kind]}")
    if no_hub_id and not exists:
        return report.fail(kind, f"{name}: no such folder", f"check --{_OPTION[kind]}")
    problem = f"{name}: neither a folder nor the id of a model on a hub"
    no_model = report.fail(kind, problem, _NAME_A_MODEL.format(_OPTION[kind]))
    if folder.is_file():
        return no_model
    of_hub = not folder.is_dir()
    if of_hub:
        try:
            snapshot = hub.cached(name, revision)
        except ValueError:  # the hub's library takes it for no repository's name
            return no_model
        # Of a target only safetensors are read, of a head torch's own files too.
        patterns = ("*.safetensors", "*.bin") if kind == "head" else ("*.safetensors",)
        if snapshot is None or not any(any(snapshot.glob(pattern)) for pattern in patterns):
            return _asked(kind, name, revision, ask)
        folder = snapshot
    try:
        return replace(read(folder), folder=name)
    except MissingShardError as error:
        if of_hub:  # an unfinished download, which the engine completes
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
