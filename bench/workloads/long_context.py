"""Prompts with long contexts, made of held-out files of the Python standard library."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache

from bench.workloads.embedded import fenced, held_out_functions
from bench.workloads.prompt import Prompt
from drafters.train.embedded.data import load_corpus

CHARACTERS = 3.4  # of Python source in a token of common tokenizers
STRIDE = 37  # lines between the beginnings of two contexts: no two prompts share a cached block
LONGEST = 700  # characters of a function in a request of `agent`
PREFIX_TOKENS = 1500  # that the prompts of `agent` share

_INSTRUCTIONS = (
    "You are an agent in a code editor. Answer every request with one JSON object that has the "
    "keys title, answer, steps and confidence, and nothing else. The open file is:\n"
)
_REQUESTS = (
    "Which function of the open file would you test first, and how?",
    "The function below was added to the file. What does it return?",
    "Plan how to add type hints to the function below.",
    "Name one input for which the function below fails.",
)


def with_context(prompts: Iterable[Prompt], tokens: int) -> list[Prompt]:
    """The prompts behind about `tokens` tokens of source code, another part of it for each."""
    return [_behind(_source(number * STRIDE, tokens), p) for number, p in enumerate(prompts)]


def agent() -> list[Prompt]:
    """Turns of an agent: a long prefix that all share, a short new request, a JSON answer."""
    prefix = _INSTRUCTIONS + fenced(_source(0, PREFIX_TOKENS))
    prompts = []
    functions = (code for code in held_out_functions() if len(code) <= LONGEST)
    for number, code in enumerate(functions):
        request = _REQUESTS[number % len(_REQUESTS)]
        if number % len(_REQUESTS):
            request += "\n" + fenced(code)
        prompts.append(
            Prompt(
                messages=(
                    {"role": "system", "content": prefix},
                    {"role": "user", "content": request},
                )
            )
        )
    return prompts


def _behind(source: str, prompt: Prompt) -> Prompt:
    if prompt.text:
        return replace(prompt, text=f"{source}\n\n{prompt.text}")
    first, *rest = prompt.messages
    content = f"This is a part of a Python module:\n{fenced(source)}\n{first['content']}"
    return replace(prompt, messages=({**first, "content": content}, *rest))


def _source(begin: int, tokens: int) -> str:
    """Whole lines with about `tokens` tokens, from line `begin` on; the first follows the last."""
    lines, wanted = _lines(), int(tokens * CHARACTERS)
    chosen, length = list[str](), 0
    while length < wanted:
        chosen.append(lines[(begin + len(chosen)) % len(lines)])
        length += len(chosen[-1]) + 1
    return "\n".join(chosen)


@cache
def _lines() -> tuple[str, ...]:
    files = sorted(load_corpus().held_out, key=lambda file: file.path)
    return tuple(line for file in files for line in file.text.splitlines() if line.strip())
