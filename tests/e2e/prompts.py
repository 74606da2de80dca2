"""Prompts in the manner of the embedded model's language: the start of some Python."""

from __future__ import annotations

HEADS = [
    "def parse_{}(text, *, strict=False):\n    ",
    "class {}Queue:\n    def __init__(self, size):\n        ",
    "import os\nimport sys\n\ndef find_{}(root):\n    for name in ",
    '"""Helpers for {} files."""\n\nfrom pathlib import ',
    "try:\n    import {}\nexcept ImportError:\n    ",
    "async def fetch_{}(session, url):\n    async with ",
    "    def test_{}_is_empty(self):\n        self.assert",
    "@property\ndef {}(self):\n    '''Return the ",
]
NAMES = ["token", "header", "window", "record"]

PROMPTS = [head.format(name) for name in NAMES for head in HEADS]
# The same function four times, and its first half.
_FUNCTION = PROMPTS[0].strip()
REPEATED = "\n\n".join([_FUNCTION] * 4) + "\n\n" + _FUNCTION[: len(_FUNCTION) // 2]
