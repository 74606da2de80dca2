"""Extract the Python program from a model's answer to a HumanEval problem."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from itertools import takewhile

from drafters.train.data.humaneval import Problem

# An answer that was cut off at its token limit has no closing fence.
_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


def program(problem: Problem, answer: str) -> str:
    """The whole program: the problem's prompt, the answer's code, the tests and their call.

    The prompt always comes first: the tests use its imports and helper functions, and the answer's
    definition of the function replaces the one without a body.
    """
    return f"{completed(problem, answer)}\n{problem.test}\ncheck({problem.entry_point})\n"


def completed(problem: Problem, answer: str) -> str:
    """The prompt and the answer's code.

    The code is the first fenced block that defines the function, else the whole text if that
    defines it. Its future statements are moved before the prompt, since only a docstring may
    precede them. An answer without a definition is taken for the function's body, from its first
    fenced block if there is one.
    """
    blocks = fenced_blocks(answer)
    for code in (*blocks, answer):
        if _defines(code, problem.entry_point):
            statements, code = _split_future_statements(code)
            return f"{statements}{problem.prompt}\n{code}"
    return problem.prompt + _indented(blocks[0] if blocks else answer)


def fenced_blocks(answer: str) -> list[str]:
    """The code of an answer's fenced blocks, dedented; the last one may have no end."""
    return [textwrap.dedent(block) for block in _FENCED.findall(answer)]


def _defines(code: str, name: str) -> bool:
    """Whether `code` defines a function of this name at its top level; it need not parse."""
    return (
        re.search(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(name)}[ \t]*\(", code, re.M) is not None
    )


def _split_future_statements(code: str) -> tuple[str, str]:
    """Lines of `from __future__ import ...` at the head of `code`, and `code` without them."""
    tree = _parsed(code)
    if tree is None:
        return "", code
    docstring = ast.get_docstring(tree) is not None
    statements = takewhile(_is_future_statement, tree.body[docstring:])
    numbers = {
        number
        for statement in statements
        for number in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
    }
    lines = code.split("\n")
    others = [line for number, line in enumerate(lines, start=1) if number not in numbers]
    return "".join(f"{lines[number - 1]}\n" for number in sorted(numbers)), "\n".join(others)


def _is_future_statement(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and statement.module == "__future__"


def _indented(body: str) -> str:
    """A function's body, indented by at least one column.

    If only the first line has lost its indentation, as when an answer's leading space is stripped,
    it gets that of the least indented line after it.
    """
    lines = [line for line in body.splitlines() if line.strip()]
    if lines and lines[0][0] in " \t":
        return body
    indented = textwrap.indent(body, "    ")
    margins = [line[: len(line) - len(line.lstrip())] for line in lines[1:]]
    margin = min(margins, key=len, default="")
    restored = textwrap.indent(textwrap.dedent(margin + body.lstrip()), "    ")
    # Both parse only if all later lines continue the first statement: then they are equivalent.
    return indented if _is_body(indented) or not _is_body(restored) else restored


def _is_body(text: str) -> bool:
    return _parsed(f"def function():\n{text}") is not None


def _parsed(code: str) -> ast.Module | None:
    """The syntax tree, or None if the text is not Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the model's code, such as invalid escapes
        try:
            return ast.parse(code)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
