"""`aerie doctor`: checks whether this machine can serve these models, and prints the findings."""

from __future__ import annotations

from collections.abc import Sequence

from app.doctor import hub, report
from app.doctor.examination import examine
from app.settings import Settings


def main(
    settings: Settings,
    *,
    as_json: bool = False,
    preset: str | None = None,
    ignored: Sequence[str] = (),
) -> int:
    """Print every finding; returns the exit code.

    `ignored` names variables that Kubernetes wrote and that were taken out of the environment.

    Of a model that is not on this machine, the configuration and the tensors' headers are read from
    its hub, no weights.
    """
    findings = examine(settings, preset=preset, ask=hub.ask, ignored=ignored)
    print(report.as_json(findings) if as_json else report.as_text(findings))
    return report.exit_code(findings)
