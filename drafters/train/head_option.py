"""The option that names a draft head: a folder, or a repository of Hugging Face's hub."""

from __future__ import annotations

import argparse
from pathlib import Path


def head_folder(name: str) -> Path:
    """The folder of the head that an option names: of a repository the snapshot in the hub's cache,
    into which it is downloaded if it is not there. Raises argparse.ArgumentTypeError."""
    folder = Path(name)
    if folder.exists() or name.count("/") != 1 or name.startswith((".", "/", "~")):
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        message = f"{name} is no folder, and the hub gives no such head: {reason}"
        raise argparse.ArgumentTypeError(message) from None


def head_name(folder: Path) -> str:
    """What a table calls a head: the name of its folder, or of its repository if the folder is a
    snapshot in the hub's cache (models--ORG--NAME/snapshots/COMMIT)."""
    folder = folder.resolve()
    repository = folder.parent.parent.name.removeprefix("models--")
    if folder.parent.name == "snapshots":
        return repository.replace("--", "/", 1)
    return folder.name
