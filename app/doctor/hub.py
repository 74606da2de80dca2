"""The model hub: what is in its cache, and what a repository says before it is downloaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from app.doctor.models import Checkpoint
from drafters.model.head_check import SELECTOR, SELECTOR_FILE
from drafters.model.weight_files import StoredTensor

# Bytes of an element, under the names that safetensors uses.
_SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}
_PATIENCE_S = 5.0  # for the first answer; the library itself tries for 24 s or more
_NOTHING_BEHIND = (502, 503, 504)  # what a proxy or gateway answers; the library tries these again


def cached(repository: str, revision: str | None = None) -> Path | None:
    """The snapshot folder in the hub's cache that holds this repository, if one does."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repository, "config.json", revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def cache_folder() -> Path:
    """Where the hub's library keeps what it downloads (HF_HOME, HF_HUB_CACHE)."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _cached_weights(repository: str, revision: str | None) -> int:
    """Bytes of the weights in the hub's cache, of a download that stopped; no file in part, since
    the library begins these again."""
    folder = cached(repository, revision)
    files = folder.glob("*.safetensors") if folder is not None else ()
    return sum(file.stat().st_size for file in files if file.exists())


def ask(repository: str, revision: str | None = None) -> Checkpoint:
    """config.json and the tensors' types and shapes, read from the hub: some kilobytes, no weights.

    Raises OSError with the error of the hub or of the network; within seconds if nothing answers.
    """
    from huggingface_hub import HfApi, hf_hub_download, list_repo_files

    if problem := _unreachable():
        raise OSError(problem)
    try:
        config = json.loads(
            Path(hf_hub_download(repository, "config.json", revision=revision)).read_text("utf-8")
        )
        files = frozenset(list_repo_files(repository, revision=revision))
        metadata = None  # stays None where there are only torch's own files
        if any(file.endswith(".safetensors") for file in files):
            metadata = HfApi().get_safetensors_metadata(repository, revision=revision)
        selector = None
        if SELECTOR_FILE in files:
            selector = HfApi().parse_safetensors_file_metadata(
                repository, SELECTOR_FILE, revision=revision
            )
    except Exception as error:  # the hub's own errors, the network's and those of its answers
        raise OSError(f"the hub says: {_reason(error)}") from None
    tensors: dict[str, StoredTensor] = {}
    for file, contents in metadata.files_metadata.items() if metadata else ():
        tensors |= _tensors(file, contents)
    if selector is not None:
        found = _tensors(SELECTOR_FILE, selector)
        tensors |= {f"{SELECTOR}.{name}": tensor for name, tensor in found.items()}
    weights_bytes = sum(tensor.size for tensor in tensors.values())
    return Checkpoint(
        folder=repository,
        config=_object(config),
        tensors=tensors,
        files=files,
        weights_bytes=weights_bytes,
        missing_bytes=max(weights_bytes - _cached_weights(repository, revision), 0),
    )


@cache
def _unreachable() -> str | None:
    """What keeps this machine from the hub; None if anything answers there."""
    from huggingface_hub import constants, get_session

    problems: SimpleQueue[str | None] = SimpleQueue()

    def knock() -> None:
        try:
            status = get_session().head(constants.ENDPOINT, timeout=_PATIENCE_S).status_code
            problems.put(f"it answers {status}" if status in _NOTHING_BEHIND else None)
        except Exception as error:  # the network's own, or the library's when it is offline
            problems.put(_first_line(error))

    # A thread, since looking up a name has no time limit, and each address has one of its own.
    Thread(target=knock, daemon=True).start()
    try:
        problem = problems.get(timeout=_PATIENCE_S)
    except Empty:
        problem = f"no answer within {_PATIENCE_S:.0f} s"
    return problem and f"the hub {constants.ENDPOINT} cannot be reached: {problem}"


def _tensors(file: str, contents: Any) -> dict[str, StoredTensor]:
    """The tensors of a file, from what the hub says of it (SafetensorsFileMetadata)."""
    tensors = {}
    for name, tensor in contents.tensors.items():
        size = tensor.parameter_count * _SIZES.get(tensor.dtype, 1)
        tensors[name] = StoredTensor(tensor.dtype, tuple(tensor.shape), Path(file), 0, size)
    return tensors


def _object(config: Any) -> Mapping[str, Any]:
    if not isinstance(config, dict):
        raise OSError("the hub's config.json is not a JSON object")
    return config


def _reason(error: Exception) -> str:
    from huggingface_hub import errors

    # Gated repositories come first: that error is a kind of the next one.
    meanings = (
        (errors.GatedRepoError, "access has to be granted there, and HF_TOKEN set"),
        (errors.RepositoryNotFoundError, "no such repository, or a private one without HF_TOKEN"),
        (errors.RevisionNotFoundError, "no such revision"),
        (errors.RemoteEntryNotFoundError, "no config.json"),
    )
    return next((text for kind, text in meanings if isinstance(error, kind)), _first_line(error))


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
