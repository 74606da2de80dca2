"""Every metric of ours is written down, and nothing else is."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import Counter, Gauge, Histogram

from app import metrics

DOCS = Path(__file__).resolve().parents[2] / "docs"
EXPORTED = {
    metric.describe()[0].name + ("_total" if isinstance(metric, Counter) else "")
    for metric in vars(metrics).values()
    if isinstance(metric, (Counter, Gauge, Histogram))
}
WRITTEN = {
    name
    for file in ("operations.md", "speculation.md", "security.md")
    for name in re.findall(r"\baerie_[a-z_]+", (DOCS / file).read_text("utf-8"))
} - {"aerie_max_k"}


def test_each_metric_is_in_the_docs() -> None:
    assert not EXPORTED - WRITTEN


def test_the_docs_name_no_other() -> None:
    assert not WRITTEN - EXPORTED
