"""The faults that are put into modules can be put there: their code is found, and stays Python."""

from __future__ import annotations

import pytest

from tests import mutants


@pytest.mark.parametrize("module", mutants.FAULTS)
def test_each_fault_replaces_code_that_its_module_has_once(module: str) -> None:
    """Catches: code that was edited since, at which `python -m tests.mutants` ends halfway."""
    text = (mutants.REPOSITORY / module).read_text("utf-8")
    for code, fault in mutants.FAULTS[module].edits:
        assert text.count(code) == 1, f"{module} has {text.count(code)} times {code!r}"
        compile(text.replace(code, fault), module, "exec")


@pytest.mark.parametrize("module", mutants.FAULTS)
def test_the_tests_of_each_fault_are_there(module: str) -> None:
    missing = [
        file for file in mutants.test_files(module) if not (mutants.REPOSITORY / file).is_file()
    ]
    assert not missing
