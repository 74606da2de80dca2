"""docs/metrics.md is what the code says, and nobody asks for a metric that is not there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.observability import metrics
from app.observability.exposition import EXPOSITION
from docs.metrics import PAGE, RULES, exported, page

HISTOGRAM_PARTS = ("_bucket", "_count", "_sum")
# `max_k` of a tenant is a field, as AERIE_... are settings.
NAME = re.compile(r"\baerie_[a-z_]+[a-z]\b")
NO_METRICS = {"aerie_head", "aerie_max_k", "aerie_speculation"}
PLACES = [*PAGE.parent.glob("*.md"), *RULES.glob("*.yml")]


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text("utf-8") == page(), "run: python -m docs.metrics"


def test_values_of_labels_are_those_that_the_help_names() -> None:
    """In the code they are literals, or names of background tasks."""
    code = [file.read_text("utf-8") for file in (PAGE.parent.parent / "app").rglob("*.py")]
    used = {pair for text in code for pair in re.findall(r'\b([A-Z_]+)\.labels\("(\w+)"\)', text)}
    tasks = {name for text in code for name in re.findall(r'BackgroundTask\("(\w+)"', text)}
    used |= {("BACKGROUND_FAILURES", task) for task in tasks}
    assert len(used) > 10
    for name, value in used:
        [family] = getattr(metrics, name).describe()
        assert value in re.split(r"\W+", family.documentation.rpartition(": ")[2]), (name, value)


def test_metrics_of_the_process_that_rules_use_are_exported() -> None:
    rules = "".join(file.read_text("utf-8") for file in RULES.glob("*.yml"))
    used = set(re.findall(r"\bprocess_\w+", rules))
    assert used
    assert used <= {family.name for family in EXPOSITION.collect()}


@pytest.mark.parametrize("file", sorted(PLACES), ids=lambda file: str(file.name))
def test_no_other_is_named(file: Path) -> None:
    parts = {name + part for name in exported() for part in HISTOGRAM_PARTS}
    named = set(NAME.findall(file.read_text("utf-8"))) - NO_METRICS
    assert named <= parts.union(exported())
