"""Load a workload by its name on the command line."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from bench.workloads.code_edits import code_edits
from bench.workloads.constraints import constrained
from bench.workloads.embedded import KINDS, SEED, embedded
from bench.workloads.extraction import extraction
from bench.workloads.files import read_file
from bench.workloads.long_context import agent, with_context
from bench.workloads.prompt import Prompt
from bench.workloads.published import held_out_chat, humaneval
from bench.workloads.quoted_texts import quoted_texts
from bench.workloads.tool_calls import tool_calls

EMBEDDED = ("mixed", *KINDS)
# Workloads whose prompts are shuffled here, all of them.
WHOLE: dict[str, Callable[[], list[Prompt]]] = {
    "humaneval": humaneval,
    "chat": held_out_chat,
    "agent": agent,
    "code-edit": code_edits,
    "quoted-text": quoted_texts,
    "extraction": extraction,
    "tool-call": tool_calls,
}
NAMES = (*WHOLE, *EMBEDDED)


def load_prompts(
    name: str,
    count: int,
    *,
    chat: bool = False,
    seed: int = SEED,
    context: int = 0,
    constraint: str = "",
) -> list[Prompt]:
    """`count` prompts of a named workload or of a file, shuffled by `seed`; repeated from the first
    if there are fewer. Each comes behind about `context` tokens of source code of its own, and its
    answer is held to the `constraint` of that name or file.

    Raises ValueError if `name` is neither or `constraint` is none, and MalformedFile, which names
    the line.
    """
    prompts = constrained(_named(name, count, chat, seed), constraint)
    return with_context(prompts, context) if context else prompts


def _named(name: str, count: int, chat: bool, seed: int) -> list[Prompt]:
    if name in EMBEDDED:
        return embedded(name, count, seed)
    if name in WHOLE:
        prompts = WHOLE[name]()
    elif (file := Path(name)).is_file():
        prompts = read_file(file, chat=chat)
    else:
        raise ValueError(f"no workload {name!r}: give {', '.join(NAMES)}, or a file")
    random.Random(f"file:{seed}").shuffle(prompts)
    return [prompts[index % len(prompts)] for index in range(count)]


def label(name: str) -> str:
    """The workload's name in tables: a file's name without folder and ending."""
    return name if name in NAMES else Path(name).name.split(".")[0]
