"""One finding of the doctor, and how findings are shown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal


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


def unless_given(finding: Finding, engine_args: Mapping[str, Any], names: Iterable[str]) -> Finding:
    """The finding; but a warning instead of a failure where one of the engine arguments `names` is
    given, which the check does not take into account."""
    given = [name for name in names if _changes_something(engine_args.get(name))]
    if finding.status != "FAIL" or not given:
        return finding
    options = ", ".join(f"--{name.replace('_', '-')}" for name in given)
    return warn(
        finding.check,
        f"not checked with {options}; without: {finding.detail}",
        f"nothing, if vLLM starts with {options}",
    )


def _changes_something(value: Any) -> bool:
    """Whether an engine argument is given, and not as what it is without: one device, `auto`."""
    is_one = value == 1 and not isinstance(value, bool)
    return bool(value) and value != "auto" and not is_one


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
