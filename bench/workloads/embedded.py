"""Workloads that need no download: held-out functions of the Python standard library.

The embedded models were not trained on these files, so that acceptance is not that of memorised
text. The same version of Python gives the same prompts for the same seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

from bench.workloads.prompt import Prompt
from drafters.train.embedded.chat import ChatSample, chat_samples
from drafters.train.embedded.data import load_corpus

SEED = 2602
LONGEST = 900  # characters of a prompt, about 300 tokens, which leaves room for the answer in 1,024
SHORTEST_CODE = 160  # characters of a function worth continuing or editing

_CHAT = ("write", "complete", "topic", "module")
_EDITS = (
    "Add a docstring to this function and leave the rest as it is:",
    "Add type hints to this function and leave the rest as it is:",
    "Write this function again with a comment before the first statement:",
    "Repeat this function without any change:",
)


def embedded(name: str, count: int, seed: int = SEED) -> list[Prompt]:
    """`count` prompts of `completion`, `stdlib-chat`, `edit` or `summarise`, or of all four in turn
    (`mixed`); repeated from the first if there are fewer."""
    if name == "mixed":
        each = [embedded(part, -(-count // len(KINDS)), seed) for part in KINDS]
        return [prompt for four in zip(*each, strict=True) for prompt in four][:count]
    prompts = KINDS[name]()
    random.Random(f"{name}:{seed}").shuffle(prompts)
    return [prompts[index % len(prompts)] for index in range(count)]


def _completion() -> list[Prompt]:
    """Prompts with the first third of a function: signature, docstring, some lines."""
    prompts = []
    for code in held_out_functions():
        lines = code.splitlines()
        head = "\n".join(lines[: max(2, len(lines) // 3)]) + "\n"
        if len(head) <= LONGEST:
            prompts.append(Prompt(text=head))
    return prompts


def _chat() -> list[Prompt]:
    return _asked(_CHAT)


def _edit() -> list[Prompt]:
    """Prompts that contain most of their answer, so that many drafts are accepted."""
    codes = [code for code in held_out_functions() if len(code) <= LONGEST]
    asked = [f"{_EDITS[i % len(_EDITS)]}\n{fenced(code)}" for i, code in enumerate(codes)]
    return [Prompt(messages=({"role": "user", "content": text},)) for text in asked]


def _summarise() -> list[Prompt]:
    return _asked(("explain",))


KINDS: dict[str, Callable[[], list[Prompt]]] = {
    "completion": _completion,
    "stdlib-chat": _chat,
    "edit": _edit,
    "summarise": _summarise,
}


def _asked(kinds: Sequence[str]) -> list[Prompt]:
    return [
        Prompt(messages=tuple({"role": m["role"], "content": m["content"]} for m in asked))
        for sample in _samples()
        if sample.kind in kinds
        for asked in [sample.messages[:-1]]
        if sum(len(m["content"]) for m in asked) <= LONGEST
    ]


def held_out_functions() -> list[str]:
    """Code of functions that the embedded models were not trained on, from the answers of samples
    that ask for a function."""
    found = []
    for sample in _samples():
        answer = sample.messages[-1]["content"]
        code = answer.removeprefix("```python\n").removesuffix("\n```")
        if sample.kind == "write" and code.startswith("def ") and len(code) >= SHORTEST_CODE:
            found.append(code)
    return found


@cache
def _samples() -> list[ChatSample]:
    return chat_samples(load_corpus().held_out, seed=0)


def fenced(code: str) -> str:
    """A block of Python code in Markdown."""
    return f"```python\n{code}\n```"
