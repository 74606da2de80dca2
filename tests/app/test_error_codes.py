"""docs/api.md has every status and `code` that an error may carry, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STATUS = re.compile(r"(?:ApiError|_refuse)\(\s*([45]\d\d)\b")


def rows_of_errors() -> list[str]:
    """The rows of the page's table of errors."""
    errors = (ROOT / "docs" / "api.md").read_text("utf-8").partition("## Errors")[2]
    return [line for line in errors.partition("\n## ")[0].splitlines() if re.match(r"\| \d", line)]


def codes_in(text: str) -> Iterator[str]:
    """The codes in a module's calls: `code=...`, and the third argument of `invalid`. Codes that
    are put together at run time are not among them."""
    for call in ast.walk(ast.parse(text)):
        if not isinstance(call, ast.Call):
            continue
        named = [each.value for each in call.keywords if each.arg == "code"]
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        third = call.args[2:3] if name == "invalid" else []
        for code in (*named, *third):
            if isinstance(code, ast.Constant) and isinstance(code.value, str):
                yield code.value


def test_the_page_lists_the_codes_that_the_gateway_gives() -> None:
    texts = [file.read_text("utf-8") for file in (ROOT / "app").rglob("*.py")]
    made = {code for text in texts for code in codes_in(text)}
    assert "unsupported_parameter" in made
    made |= {"previous_response_not_found", "previous_item_not_found"}
    codes = " ".join(row.split("|")[2] for row in rows_of_errors())
    assert set(re.findall(r"`([a-z_]+)`", codes)) == made


def test_the_page_lists_the_statuses_that_the_gateway_gives() -> None:
    texts = [file.read_text("utf-8") for file in (ROOT / "app").rglob("*.py")]
    given = {status for text in texts for status in STATUS.findall(text)}
    assert {"408", "431"} <= given
    given |= {"405"}  # the router's
    statuses = " ".join(row.split("|")[1] for row in rows_of_errors())
    assert set(re.findall(r"\d{3}", statuses)) == given
