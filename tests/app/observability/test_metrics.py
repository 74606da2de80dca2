"""Every metric of ours is explained, and starts with a value."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

from prometheus_client import Counter, Gauge, Histogram

from app.admission.limiter import Kind
from app.engine.supervisor import DIED, HUNG
from app.observability import metrics

DOCS = Path(__file__).resolve().parents[3] / "docs"
EXPORTED = {
    metric.describe()[0].name + ("_total" if isinstance(metric, Counter) else "")
    for metric in vars(metrics).values()
    if isinstance(metric, (Counter, Gauge, Histogram))
}
WRITTEN = {
    name
    for file in (
        *("operations.md", "speculation.md", "security.md"),
        *("learning.md", "generations.md"),
    )
    for name in re.findall(r"\baerie_[a-z_]+", (DOCS / file).read_text("utf-8"))
}


def test_each_metric_is_in_the_docs() -> None:
    assert not EXPORTED - WRITTEN


def test_what_a_label_can_be_is_there_from_the_start() -> None:
    """A rate over the first event needs a value before it."""
    script = (
        "from app.observability import metrics; from prometheus_client import generate_latest;"
        "print(generate_latest().decode())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=DOCS.parent, capture_output=True, text=True, check=True
    )
    counters = {
        "REFUSED": "aerie_requests_refused_total", "EXPIRED": "aerie_requests_expired_total",
        "KEY_RELOADS": "aerie_key_reloads_total",
        "CONNECTIONS_REFUSED": "aerie_connections_refused_total",
        "ENGINE_RESTARTS": "aerie_engine_restarts_total",
        "HEAD_SWAPS": "aerie_head_swaps_total",
        "LEARNING_DROPPED": "aerie_learning_dropped_sequences_total",
    }  # fmt: skip
    used = {(counters["REFUSED"], kind) for kind in get_args(Kind)}
    used |= {(counters["ENGINE_RESTARTS"], reason) for reason in (DIED, HUNG)}
    for source in (DOCS.parent / "app").rglob("*.py"):
        text = source.read_text("utf-8")
        for name, label in re.findall(r'metrics\.(\w+)\.labels\("(\w+)"\)', text):
            used.add((counters[name], label))
        for label in re.findall(r'self\._refuse\([^)]*"(\w+)"\)', text):
            used.add((counters["CONNECTIONS_REFUSED"], label))
        for label in re.findall(r'self\._expire\("(\w+)"', text):
            used.add((counters["EXPIRED"], label))
    shown = re.findall(r'^(\w+)\{\w+="(\w+)"\} 0\.0$', done.stdout, re.MULTILINE)
    assert {pair for pair in shown if pair[0] in counters.values()} == used
