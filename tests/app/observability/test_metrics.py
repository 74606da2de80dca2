"""Every metric of ours is explained, and starts with a value."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from prometheus_client import REGISTRY

from app.admission.limiter import Kind
from app.endpoints import declared
from app.engine.launched_engine import DIED, HUNG
from app.main import create_app
from app.observability import metrics
from app.routes.operations import metered_paths
from app.settings import load
from docs.metrics import exported
from drafters.config import HEAD, LOOKUP
from drafters.control.controller import Controller
from drafters.control.objective import FIXED, Objective
from drafters.control.policy import Load, Step
from tests.app.phased_engine import PhasedEngine

DOCS = Path(__file__).resolve().parents[3] / "docs"
GUIDES = ("operations.md", "speculation.md", "security.md", "learning.md", "generations.md")


def test_each_metric_is_in_a_guide() -> None:
    text = "".join((DOCS / guide).read_text("utf-8") for guide in GUIDES)
    assert set(exported()) <= set(re.findall(r"\baerie_[a-z_]+", text))


@pytest.mark.parametrize(("drafter", "by_position"), [(HEAD, [2.0, 1.0]), (LOOKUP, [0.0, 0.0])])
def test_positions_are_those_of_the_heads_drafts_alone(
    drafter: str, by_position: list[float]
) -> None:
    """Where vLLM's own lookup drafts in place of a head, its drafts are counted as lookups."""

    def counted() -> list[float]:
        samples = (
            ("aerie_drafts_verified_total", {"position": "1"}),
            ("aerie_drafts_accepted_total", {"position": "1"}),
            ("aerie_source_drafts_verified_total", {"source": drafter}),
        )
        return [REGISTRY.get_sample_value(name, labels) or 0.0 for name, labels in samples]

    policy = Controller(2, drafter=drafter)
    empty, before = policy.snapshot(), counted()
    load = Load(2, draft_tokens=4)
    policy.observe(Step(load, 2, 0.01, 3, drafted=(2, 2), accepted=(1, 0)))
    metrics.count_speculation(policy.snapshot(), empty)
    grown = [now - then for now, then in zip(counted(), before, strict=True)]
    assert grown == [*by_position, 4.0]


def test_k_is_that_of_the_steps_where_no_request_may_have_drafts() -> None:
    """The fault: it stayed the K in force, at which `NotDrafting` asks for verified drafts."""
    policy, found = Controller(3, objective=Objective(FIXED, k=2)), []
    for drafts_off in (False, True, False):
        policy.choose(Load(1, drafts_off=drafts_off))
        metrics.count_speculation(policy.snapshot(), None)
        found.append(REGISTRY.get_sample_value("aerie_k"))
    assert found == [2.0, 0.0, 2.0]


def test_without_a_head_the_largest_k_is_none() -> None:
    """The fault: it was the setting `k`, which is the head's."""
    found = []
    for k_max, lookups in ((3, 0), (0, 10)):
        policy = Controller(k_max, lookup_tokens=lookups)
        metrics.count_speculation(policy.snapshot(), None)
        found.append(REGISTRY.get_sample_value("aerie_draft_tokens_per_step"))
    assert found == [3.0, 0.0]


def test_failures_of_each_path_are_there_from_the_start() -> None:
    """The fault: the first burst of failures had no rate, as no sample came before it."""
    settings = load({}, {}, preset="embedded")
    create_app(settings, PhasedEngine(settings))
    for path in metered_paths(declared()):
        for status in ("500", "503", "504"):
            labels = {"path": path, "status": status}
            assert REGISTRY.get_sample_value("aerie_responses_total", labels) is not None


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
        for label in re.findall(r'\.expire\("(\w+)"', text):
            used.add((counters["EXPIRED"], label))
    shown = re.findall(r'^(\w+)\{\w+="(\w+)"\} 0\.0$', done.stdout, re.MULTILINE)
    assert {pair for pair in shown if pair[0] in counters.values()} == used
