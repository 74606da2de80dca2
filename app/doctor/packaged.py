"""Check of a target that an installed package carries: is it converted, or can it be?"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from app.doctor import models
from app.doctor.report import Finding, fail, ok
from drafters.model.weight_files import StoredTensor
from drafters.packaged import (
    PackagedModel,
    PackagedModelError,
    cache_folder,
    find,
    packaged_model,
)

CHECK = "packaged"
# Read by the conversion only; the engine needs the others that it reads.
LIBRARIES = ("accelerate", "gguf")


def check(name: str) -> Finding:
    """Whether the checkpoint is there, or what the first start needs to make it."""
    try:
        model = packaged_model(name)
        if (folder := find(name)) is not None:
            return ok(CHECK, f"converted: {folder}")
        source = model.source()
        if missing := [library for library in LIBRARIES if find_spec(library) is None]:
            return fail(CHECK, f"{name}: {' and '.join(missing)} not installed", "make install")
        return _check_room(model, source, cache_folder())
    except PackagedModelError as error:
        return fail(CHECK, error.problem, error.remedy)
    except OSError as error:
        remedy = "let this user read and write there, or set XDG_CACHE_HOME"
        return fail(CHECK, f"{name}: {error.filename}: {error.strerror}", remedy)


def _check_room(model: PackagedModel, source: Path, cache: Path) -> Finding:
    folder = next(path for path in (cache, *cache.parents) if path.exists())
    needed, free = model.checkpoint_bytes, shutil.disk_usage(folder).free
    size = f"{needed // 10**6} MB"
    if not os.access(folder, os.W_OK | os.X_OK):
        remedy = "let this user write there, or set XDG_CACHE_HOME"
        return fail(CHECK, f"not converted yet, and {folder} is not writable", remedy)
    if free < needed:
        remedy = "free room there, or set XDG_CACHE_HOME to a folder that has it"
        detail = f"not converted yet: {folder} has {free // 10**6} MB, it takes {size}"
        return fail(CHECK, detail, remedy)
    return ok(CHECK, f"not converted yet: the first start makes {size} of {source.name} in {cache}")


def read(name: str) -> models.Checkpoint | Finding:
    """The packaged target's checkpoint, or what is known of it before it is converted."""
    try:
        model = packaged_model(name)
        if (folder := find(name)) is not None:
            return replace(models.read_checkpoint(folder), folder=name)
    except PackagedModelError as error:
        return fail("model", error.problem, error.remedy)
    except (OSError, ValueError) as error:
        return fail("model", f"{name}: {error}", "make it readable, or set XDG_CACHE_HOME")
    shape = (model.config["vocab_size"], model.config["hidden_size"])
    embedding = StoredTensor(model.config.get("dtype", "BF16"), shape, Path(name), 0, 0)
    return models.Checkpoint(
        folder=name,
        config=model.config,
        tensors={"embedding": embedding},
        files=frozenset(models.TOKENIZER_FILES),
        weights_bytes=model.checkpoint_bytes,
    )
