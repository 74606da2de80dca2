"""Every public function and class says what it does, in words that stand alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("app", "bench", "drafters")
FEWEST_WORDS = 4
RIDDLES = ("Of ", "As in", "Likewise")
Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public(body: list[ast.stmt], within: str = "") -> Iterator[tuple[str, Documented]]:
    """Name and node of what others may use: neither private nor the setter of a property."""
    for node in body:
        if isinstance(node, Documented) and not node.name.startswith("_"):
            if any(getattr(each, "attr", "") == "setter" for each in node.decorator_list):
                continue
            yield within + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, f"{within}{node.name}.")


def fault(docstring: str | None) -> str:
    """What is wrong with a docstring, or nothing."""
    if docstring is None:
        return "no docstring"
    if len(docstring.split()) < FEWEST_WORDS:
        return f"fewer than {FEWEST_WORDS} words: {docstring}"
    if docstring.startswith(RIDDLES):
        return f"does not say of what it speaks: {docstring.splitlines()[0]}"
    return ""


def faults(source: str) -> list[str]:
    """The faults of a module, each with its line and name."""
    return [
        f"{node.lineno}: {name}: {found}"
        for name, node in public(ast.parse(source).body)
        if (found := fault(ast.get_docstring(node)))
    ]


def test_docstrings_stand_alone() -> None:
    found = [
        f"{file.relative_to(REPOSITORY)}:{each}"
        for package in PACKAGES
        for file in sorted((REPOSITORY / package).rglob("*.py"))
        for each in faults(file.read_text("utf-8"))
    ]
    assert not found, "\n".join(found)


def test_faults_are_found() -> None:
    source = '''
def silent(): pass
def short(): "Close all."
def riddle(): "Of a load, the number of requests."
def good(): "Close every connection that idles."
def _private(): pass
class Thing:
    """A thing with a property."""
    @property
    def k(self): "Draft tokens of each request."
    @k.setter
    def k(self, value): pass
    async def method(self): "Likewise for a single one."
'''
    assert [each.split(": ")[1] for each in faults(source)] == [
        "silent",
        "short",
        "riddle",
        "Thing.method",
    ]
