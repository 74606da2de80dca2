"""Small files of JSON for their owner alone, which a reader sees whole: the old one or the new."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def read_json(file: Path) -> Any:
    """The content of a file; None if there is none. Raises OSError, and ValueError that names the
    file."""
    try:
        return json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from None


def replace_json(file: Path, content: Any) -> None:
    """Write a file, which appears whole and outlives a power cut. Raises OSError."""
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
    try:
        owner = os.stat(file.parent)
        if os.geteuid() == 0 and owner.st_uid:  # an operator as root: the gateway has to read it
            os.fchown(handle, owner.st_uid, owner.st_gid)
        with os.fdopen(handle, "w") as out:
            json.dump(content, out, indent=1)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
    except BaseException:
        os.unlink(temporary)
        raise
