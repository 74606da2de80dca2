"""The calibration file: measured step costs, kept for the next start on the same machine."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drafters.control.cost_table import Cell

FORMAT = 2


class CalibrationError(ValueError):
    """A calibration cannot be used here; the message says why."""


def save(path: Path, cells: Sequence[Cell], fingerprint: Mapping[str, str]) -> None:
    """Write cells and what they were measured on: hardware, model, head, versions."""
    document = {"format": FORMAT, "fingerprint": dict(fingerprint), "cells": cells}
    path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def read(path: Path, fingerprint: Mapping[str, str]) -> tuple[Cell, ...]:
    """Read cells whose fingerprint is this one. Raises CalibrationError for any others."""
    try:
        document: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if document["format"] != FORMAT:
            raise CalibrationError(f"{path}: format {document['format']!r}, not {FORMAT}")
        saved = document["fingerprint"]
        cells = tuple(Cell(*row) for row in document["cells"])
        if not isinstance(saved, dict) or not all(map(_is_possible, cells)):
            raise CalibrationError(f"{path} is not a calibration: impossible cells")
        if all(cell.k for cell in cells):
            raise CalibrationError(f"{path} is not a calibration: no cell of K = 0")
    except CalibrationError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CalibrationError(f"{path} is not a calibration: {error}") from error
    differing = [
        f"{name} is {fingerprint.get(name)!r} and was {saved.get(name)!r}"
        for name in sorted({*fingerprint, *saved})
        if fingerprint.get(name) != saved.get(name)
    ]
    if differing:
        raise CalibrationError(f"{path} was measured on something else: {'; '.join(differing)}")
    return cells


def _is_possible(cell: Cell) -> bool:
    whole = all(type(count) is int for count in (cell.requests, cell.k, cell.steps))
    least = min(cell.requests - 1, cell.k, cell.steps - 1)
    return whole and least >= 0 and math.isfinite(cell.seconds) and cell.seconds > 0
