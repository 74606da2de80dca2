"""Code edits: a file of Python, to be returned with one change. Most of an answer is in its prompt.

The files are held-out functions of the standard library, a few together, and HumanEval's functions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from bench.workloads.embedded import fenced, held_out_functions
from bench.workloads.prompt import Prompt
from drafters.train.data.humaneval import problems

SHORTEST, LONGEST = 500, 1500  # characters of a file, about 150 to 500 tokens
_REQUEST = (
    "{file}\n{change} Change nothing else. Answer with the whole file in one code block, without "
    "explanations."
)


def code_edits() -> list[Prompt]:
    """A prompt for each file; the four kinds of change take turns. Raises ValueError without
    HumanEval's package."""
    prompts = []
    for number, file in enumerate(source_files()):
        request = _REQUEST.format(file=fenced(file), change=_change(file, number))
        prompts.append(Prompt(messages=({"role": "user", "content": request},)))
    return prompts


def source_files() -> list[str]:
    """Python code of SHORTEST to LONGEST characters each, which parses. Raises ValueError without
    HumanEval's package."""
    solved = (problem.prompt + problem.canonical_solution for problem in problems())
    return [*_joined(held_out_functions()), *(file.strip() for file in solved if _fits(file))]


def _joined(functions: list[str]) -> Iterator[str]:
    """Functions in their order, as many together as make a file of SHORTEST characters."""
    file = ""
    for function in functions:
        file = f"{file}\n\n\n{function}" if file else function
        if len(file) >= SHORTEST:
            if _fits(file):
                yield file
            file = ""


def _fits(file: str) -> bool:
    if not SHORTEST <= len(file) <= LONGEST:
        return False
    try:
        return bool(_functions(file))
    except SyntaxError:  # Python 2, in tests of lib2to3
        return False


def _functions(file: str) -> list[ast.FunctionDef]:
    return [node for node in ast.parse(file).body if isinstance(node, ast.FunctionDef)]


def _change(file: str, number: int) -> str:
    """The sentence that asks for change `number` of the file's last function."""
    function = _functions(file)[-1]
    name = function.name
    parameters = [argument.arg for argument in function.args.args if argument.arg != "self"]
    kind = number % 4
    if kind == 0 or (kind == 1 and not parameters):
        return f"Rename the function `{name}` to `{name.strip('_')}_renamed` everywhere."
    if kind == 1:
        old = parameters[0]
        return f"Rename the parameter `{old}` of the function `{name}` to `{old}_value` everywhere."
    if kind == 2:
        line = file.splitlines()[function.body[-1].lineno - 1].strip()
        return f"Add the comment `# The last statement of {name}.` above the line `{line}`."
    return f'Add the line `print("{name} begins")` as the first statement of `{name}`.'
