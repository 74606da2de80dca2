"""The file of measured step costs: whose is believed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.engine.calibration_file import CalibrationError, read, save
from drafters.control.cost_table import Cell

HERE = {"hardware": "NVIDIA B200", "model": "target", "head": "head-1", "vllm": "0.32.0"}
CELLS = (Cell(1, 0, 0.01, 3), Cell(64, 7, 0.2, 4))


def test_saved_and_read_it_is_the_same(tmp_path: Path) -> None:
    save(tmp_path / "costs.json", CELLS, HERE)
    assert read(tmp_path / "costs.json", HERE) == CELLS


def test_another_machine_or_head_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path / "costs.json", CELLS, HERE)
    other = {**HERE, "hardware": "NVIDIA H200", "head": "head-2"}
    with pytest.raises(CalibrationError) as caught:
        read(tmp_path / "costs.json", other)
    assert "hardware is 'NVIDIA H200' and was 'NVIDIA B200'" in str(caught.value)
    assert "head is 'head-2' and was 'head-1'" in str(caught.value)
    assert "model" not in str(caught.value)


@pytest.mark.parametrize("fingerprint", [{}, {**HERE, "dtype": "float32"}])
def test_a_missing_or_additional_fact_is_a_mismatch(
    tmp_path: Path, fingerprint: dict[str, str]
) -> None:
    save(tmp_path / "costs.json", CELLS, HERE)
    with pytest.raises(CalibrationError, match="something else"):
        read(tmp_path / "costs.json", fingerprint)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        json.dumps({"format": 1, "fingerprint": HERE, "cells": [[1, 0, 0.1, 5]]}),
        json.dumps({"format": 2, "fingerprint": HERE, "cells": []}),
        json.dumps({"format": 2, "fingerprint": HERE, "cells": [[1, 0, 0.0, 5]]}),
        json.dumps({"format": 2, "fingerprint": HERE, "cells": [[1, 0, 0.1]]}),
        json.dumps({"format": 2, "fingerprint": HERE, "cells": [["1", 0, 0.1, 5]]}),
        json.dumps({"format": 2, "fingerprint": [], "cells": [[1, 0, 0.1, 5]]}),
        '{"format": 2, "fingerprint": {}, "cells": [[1, 0, NaN, 5]]}',
        '{"format": 2, "fingerprint": {}, "cells": [[1, 0, Infinity, 5]]}',
        '{"format": 2, "fingerprint": {}, "cells": [[1, 0.5, 0.1, 5]]}',
        '{"format": 2, "fingerprint": {}, "cells": [[1, 1, 0.1, 5]]}',
    ],
)
def test_a_damaged_file_is_refused_and_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(CalibrationError, match=r"costs\.json"):
        read(file, {})


def test_a_missing_file_is_refused_and_named(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"none\.json"):
        read(tmp_path / "none.json", HERE)
