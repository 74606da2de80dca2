"""The held-out conversations of the default model, shipped as JSON lines beside its heads.

The target wrote the questions itself; no head was trained on them. Acceptance on text that a head
was trained on would be too high.
"""

from __future__ import annotations

from pathlib import Path

from drafters.train.data.examples import Example, read_examples

FILE = Path(__file__).parents[3] / "models" / "smollm2-135m" / "held-out-chat.jsonl"


def conversations(file: Path = FILE) -> list[Example]:
    """Every conversation of the file, in order. Raises ValueError if there is no such file."""
    if not file.is_file():
        raise ValueError(
            f"workload `chat` is read from {file}, which does not exist: "
            "give a file of your own with --prompts or --workload FILE"
        )
    return read_examples([file])
