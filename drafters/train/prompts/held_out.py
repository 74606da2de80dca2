"""Which prompts are held out: a hash of the text decides, so no other prompt changes it."""

from __future__ import annotations

import hashlib

from drafters.train.prompts.selection import normalised


def is_held_out(text: str, share: float) -> bool:
    """Whether a prompt belongs to the held-out `share` (0 to 1) of all texts.

    A text is on the same side in every run with this share, whatever else was sampled. What a
    smaller share holds out, a larger one does too. Case and white space make no difference.
    """
    digest = hashlib.sha256(normalised(text).encode(errors="replace")).digest()
    return int.from_bytes(digest[:8]) < share * 2**64
