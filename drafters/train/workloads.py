"""The prompts of an evaluation, by workload: those of files, or the embedded ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from drafters.train.embedded.data import load_corpus
from drafters.train.embedded.prompts import chat_prompts, code_prompts
from drafters.train.embedded.template import CHAT_TEMPLATE
from drafters.train.embedded.tokenizer import MARKERS, SPECIAL
from drafters.train.examples import encode, read_examples

SEED = 2602  # of the embedded workloads' prompts

Report = Callable[[str], None]
Malformed = Literal["fail", "skip"]
Prompts = list[list[int]]


def held_out_prompts(tokenizer: Any, count: int) -> dict[str, Prompts]:
    """The embedded workloads: `count` prompts each, from files kept from training.

    `tokenizer` is a `tokenizers.Tokenizer`.
    """
    files = load_corpus().held_out
    return {
        "code": code_prompts(files, tokenizer, count, SEED),
        "chat": chat_prompts(files, tokenizer, count, SEED),
    }


def is_embedded(tokenizer: Any) -> bool:
    """Whether a target's tokenizer is of the embedded kind, special tokens, chat format and all."""
    ids = tokenizer.convert_tokens_to_ids([*SPECIAL, *MARKERS])
    return ids == list(range(len(ids))) and tokenizer.chat_template == CHAT_TEMPLATE


def file_prompts(
    files: Sequence[Path],
    tokenizer: Any,
    count: int,
    room: int,
    *,
    malformed: Malformed,
    report: Report,
) -> dict[str, Prompts]:
    """The first `count` usable prompts of each file: workloads named after the files."""
    workloads: dict[str, Prompts] = {}
    for file in files:
        if file.stem in workloads:
            raise ValueError(f"two workloads have the name {file.stem!r}: rename a file")
        prompts: Prompts = []
        too_long = 0
        for example in read_examples([file], malformed=malformed, report=report):
            if len(prompts) == count:
                break
            try:
                ids = encode(example, tokenizer, max_tokens=room)
            except ValueError as error:
                if malformed == "fail":
                    raise
                report(str(error))
                continue
            if ids is None:
                too_long += 1
            else:
                prompts.append(ids)
        if too_long:
            report(f"{file}: left out {too_long} prompts of more than {room} tokens")
        if not prompts:
            raise ValueError(f"{file}: not one usable prompt")
        workloads[file.stem] = prompts
    return workloads
