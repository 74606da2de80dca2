"""The doctor says how the engine will start, and how that of a running gateway did."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from app.doctor import start_path
from app.settings import load
from tests.http_server import Handler, serving

SETTINGS = load({"model": "org/target", "drafter": "org/head"}, {})
READY = {"status": "ready", "phase": "ready"}


@pytest.mark.parametrize(
    ("given", "environ", "on_cpu", "detail"),
    [
        ({}, {}, False, "v2: .*; if it does not start: v1-eager or no-drafts"),
        ({"strict_speculation": True}, {}, False, "v2: .*; exits if it does not start"),
        ({}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}, False, "v1: .*: v1-eager or no-drafts"),
        ({}, {}, True, "v1: vLLM's V1 model runner$"),
        ({"k": "0"}, {}, False, "no-drafts: no drafts$"),
        ({}, {}, False, "no drafts by lookup or grammar there"),
    ],
)
def test_the_plan_is_told(
    given: dict[str, Any], environ: dict[str, str], on_cpu: bool, detail: str
) -> None:
    settings = load({"model": "org/target", "drafter": "org/head", **given}, {})
    finding = start_path.check_plan(settings, environ, on_cpu=on_cpu)
    assert finding.status == "ok"
    assert re.search(detail, finding.detail), finding.detail


@pytest.mark.parametrize(
    ("given", "on_cpu", "status", "detail"),
    [
        ({}, False, "ok", "no-drafts: no drafts; if it does not start: v1-eager"),
        ({}, True, "ok", "no-drafts: no drafts"),
        ({"strict_speculation": True}, False, "FAIL", "recurrent layers, and strict_speculation"),
    ],
)
def test_the_plan_begins_where_lookups_are_left_out(
    given: dict[str, Any], on_cpu: bool, status: str, detail: str
) -> None:
    settings = load({"model": "org/target", **given}, {})
    finding = start_path.check_plan(settings, {}, on_cpu=on_cpu, without_lookups=True)
    assert finding.status == status
    assert detail in finding.detail
    assert ("v1-eager" in finding.detail) is (status == "ok" and not on_cpu)


def test_a_wish_that_cannot_be_read_fails() -> None:
    environ = {"VLLM_USE_V2_MODEL_RUNNER": "maybe"}
    finding = start_path.check_plan(SETTINGS, environ, on_cpu=False)
    assert finding.status == "FAIL" and "maybe" in finding.detail


@pytest.mark.parametrize(
    ("state", "status", "detail"),
    [
        ({**READY, "path": {"name": "v2", "reason": "none"}}, "ok", "on v2"),
        ({**READY, "path": {"name": "v1", "reason": "unsupported"}}, "ok", "on v1"),
        ({**READY, "path": {"name": "v1-eager", "reason": "memory"}}, "warn", "memory"),
        ({"status": "not ready", "phase": "loading"}, "warn", "loading"),
    ],
)
def test_a_gateway_that_fell_back_is_warned_of(
    state: dict[str, Any], status: str, detail: str
) -> None:
    finding = start_path.check_running(state)
    assert finding.status == status and detail in finding.detail


@pytest.mark.parametrize(
    ("status", "body", "seen"),
    [
        (200, json.dumps(READY), True),
        (503, '{"status": "not ready", "phase": "loading"}', True),
        (200, "<html>", False),
        (404, "no such page", False),
        (200, "[1]", False),
    ],
)
def test_only_a_gateway_is_taken_for_one(status: int, body: str, seen: bool) -> None:
    class Answer(Handler):
        def do_GET(self) -> None:
            assert self.path == "/readyz"
            self.answer(status, body.encode())

    with serving(Answer) as url:
        state = start_path.running("0.0.0.0", int(url.rpartition(":")[2]))
    assert state == (json.loads(body) if seen else None)


def test_nobody_listens() -> None:
    assert start_path.running("127.0.0.1", 1) is None
