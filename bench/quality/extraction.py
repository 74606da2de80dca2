"""The Python program that a model's answer to a HumanEval problem makes."""

from __future__ import annotations

import re
import textwrap

from drafters.train.humaneval import Problem

# An answer that was cut off at its token limit has no closing fence.
_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


def program(problem: Problem, answer: str) -> str:
    """Return the whole program: the problem's prompt, the answer's code, the tests and their call.

    The prompt always comes first: its imports and helper functions are used by the tests, and the
    answer's own definition of the function replaces the one without a body.
    """
    return f"{completed(problem, answer)}\n{problem.test}\ncheck({problem.entry_point})\n"


def completed(problem: Problem, answer: str) -> str:
    """Return the prompt and the answer's code.

    The code is the first fenced block that defines the function, else the whole text if that
    defines it. An answer without a definition is taken for the function's body, from its first
    fenced block if there is one.
    """
    blocks = [textwrap.dedent(block) for block in _FENCED.findall(answer)]
    for code in (*blocks, answer):
        if _defines(code, problem.entry_point):
            return f"{problem.prompt}\n{code}"
    return problem.prompt + _indented(blocks[0] if blocks else answer)


def _defines(code: str, name: str) -> bool:
    """Whether `code` defines a function of this name at its top level; it need not parse."""
    return (
        re.search(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(name)}[ \t]*\(", code, re.M) is not None
    )


def _indented(body: str) -> str:
    """A function's body, indented by at least one column."""
    lines = [line for line in body.splitlines() if line.strip()]
    if lines and lines[0][0] in " \t":
        return body
    return textwrap.indent(body, "    ")
