"""Prometheus' own tool reads what we ship, and every alert has its runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
PROMETHEUS = REPOSITORY / "deploy" / "prometheus"
RUNBOOKS = REPOSITORY / "docs" / "alerts.md"
SEVERITIES = {"page", "ticket"}
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((PROMETHEUS / "rules" / "alerts.yml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
]


def promtool(*arguments: str) -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_can_read_its_configuration() -> None:
    promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))


def test_rules_and_alerts_do_what_they_say() -> None:
    tests = sorted(str(file) for file in (PROMETHEUS / "tests").glob("*.test.yml"))
    assert tests
    promtool("test", "rules", *tests)


def test_every_alert_is_tested_for_firing() -> None:
    fired = {
        case["alertname"]
        for file in (PROMETHEUS / "tests").glob("*.test.yml")
        for test in yaml.safe_load(file.read_text("utf-8"))["tests"]
        for case in test.get("alert_rule_test", [])
        if case["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in ALERTS}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: f"{rule['alert']}-{rule['for']}")
def test_every_alert_has_a_runbook(rule: dict[str, Any]) -> None:
    sections = re.findall(r"^### (\w+)$", RUNBOOKS.read_text("utf-8"), re.MULTILINE)
    assert rule["alert"] in sections
    file, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert (REPOSITORY / file, anchor) == (RUNBOOKS, rule["alert"].lower())
    assert rule["labels"]["severity"] in SEVERITIES
