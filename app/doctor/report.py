"""One finding of the doctor, and how findings are shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; what is not ok says what to do about it."""

    check: str
    status: Literal["ok", "warn", "FAIL"]
    detail: str
    remedy: str | None = None

    def __post_init__(self) -> None:
        assert (self.remedy is None) == (self.status == "ok"), f"{self.check}: remedy or ok"


def ok(check: str, detail: str) -> Finding:
    """A finding that asks for nothing."""
    return Finding(check, "ok", detail)


def warn(check: str, detail: str, remedy: str) -> Finding:
    """A finding with which the gateway serves, though not as well as it could."""
    return Finding(check, "warn", detail, remedy)


def fail(check: str, detail: str, remedy: str) -> Finding:
    """A finding with which the gateway will not start, or will not do what was asked."""
    return Finding(check, "FAIL", detail, remedy)


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if any check failed, else 0."""
    return int(any(finding.status == "FAIL" for finding in findings))


def as_text(findings: Sequence[Finding]) -> str:
    """One line per check, a remedy below each that is not ok, a closing count."""
    width = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status:<4}  {finding.check:<{width}}  {finding.detail}")
        if finding.remedy:
            lines.append(f"{'':<{width + 6}}  -> {finding.remedy}")
    failed = sum(finding.status == "FAIL" for finding in findings)
    warned = sum(finding.status == "warn" for finding in findings)
    lines.append(f"{len(findings)} checks, {failed} failed, {warned} warnings")
    return "\n".join(lines)


def as_json(findings: Sequence[Finding]) -> str:
    """All findings as one JSON object."""
    document = {
        "healthy": exit_code(findings) == 0,
        "checks": [asdict(finding) for finding in findings],
    }
    return json.dumps(document, indent=2)
