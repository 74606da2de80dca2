"""How findings are shown and what the command returns."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from app.cli import main
from app.doctor import report
from app.doctor.examination import examine
from app.settings import load

FINDINGS = [
    report.ok("python", "3.11.7"),
    report.warn("cores", "1", "give it two"),
    report.fail("port", "taken", "choose another"),
]


def test_each_finding_is_one_line_with_its_remedy_below() -> None:
    assert report.as_text(FINDINGS).splitlines() == [
        "ok    python  3.11.7",
        "warn  cores   1",
        "              -> give it two",
        "FAIL  port    taken",
        "              -> choose another",
        "3 checks, 1 failed, 1 warnings",
    ]


def test_a_warning_is_no_failure() -> None:
    assert report.exit_code(FINDINGS) == 1
    assert report.exit_code(FINDINGS[:2]) == 0


def test_a_finding_that_is_not_ok_needs_a_remedy() -> None:
    with pytest.raises(AssertionError):
        report.Finding("port", "FAIL", "taken")


def test_the_command_names_a_taken_port_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = main(["doctor", "--json", "--port", str(port)])
    document = json.loads(capsys.readouterr().out)
    statuses = {check["check"]: check["status"] for check in document["checks"]}
    assert (code, document["healthy"], statuses["port"]) == (1, False, "FAIL")


def test_a_missing_and_a_broken_folder(tmp_path: Path) -> None:
    """A hub id is no folder, so a missing one warns; a folder without a model fails."""
    settings = load({"model": "someone/model", "drafter": str(tmp_path), "port": 0}, {})
    statuses = {finding.check: finding.status for finding in examine(settings)}
    assert statuses["model"] == "warn"
    assert statuses["head"] == "FAIL"
