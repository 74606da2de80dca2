"""Which head a gateway was started with, and for which target: the generations of a folder descend
from it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from app.settings import Settings

WEIGHTS = "model.safetensors"


def first_head(settings: Settings) -> str:
    """The target's name and revision, and the head's name and, where it is a folder of this
    machine, the digest of its weights. Reads the file; raises OSError."""
    model, drafter = settings.model, str(settings.speculation.drafter)
    named = [model.model, model.revision or "", drafter]
    weights = Path(drafter) / WEIGHTS
    if weights.is_file():
        with weights.open("rb") as content:
            # What it is called does not matter then: a container may have it elsewhere.
            named[-1] = hashlib.file_digest(content, "sha256").hexdigest()
    return " ".join(named)
