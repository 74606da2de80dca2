"""`aerie doctor`: prints what this machine and these models lack to be served."""

from __future__ import annotations

from app.doctor import hub, report
from app.doctor.examination import examine
from app.settings import Settings


def main(settings: Settings, *, as_json: bool = False, preset: str | None = None) -> int:
    """Print every finding; returns the exit code. Models that are not here are asked for at
    their hub: configurations and tensor headers, no weights."""
    findings = examine(settings, preset=preset, ask=hub.ask)
    print(report.as_json(findings) if as_json else report.as_text(findings))
    return report.exit_code(findings)
