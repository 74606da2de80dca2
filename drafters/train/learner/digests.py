"""What is the same for equal token ids."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def digest(*parts: Sequence[int]) -> bytes:
    """The sha256 of token ids in parts: 32 bytes."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(array("I", part).tobytes())
    return found.digest()
