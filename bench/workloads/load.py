"""A workload by the name it has on the command line."""

from __future__ import annotations

import random
from pathlib import Path

from bench.workloads.embedded import KINDS, SEED, embedded
from bench.workloads.files import read_file
from bench.workloads.prompt import Prompt

EMBEDDED = ("mixed", *KINDS)


def load_prompts(name: str, count: int, *, chat: bool = False, seed: int = SEED) -> list[Prompt]:
    """`count` prompts of an embedded workload or of a file, shuffled by `seed`.

    Raises ValueError if it is neither, MalformedFile naming the line.
    """
    if name in EMBEDDED:
        return embedded(name, count, seed)
    file = Path(name)
    if not file.is_file():
        raise ValueError(f"no workload {name!r}: give {', '.join(EMBEDDED)}, or a file")
    prompts = read_file(file, chat=chat)
    random.Random(f"file:{seed}").shuffle(prompts)
    return [prompts[index % len(prompts)] for index in range(count)]


def label(name: str) -> str:
    """What tables call it: a file's name without its folder."""
    return name if name in EMBEDDED else Path(name).name.split(".")[0]
