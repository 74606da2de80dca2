"""The record of a run can be made wherever a run can."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from drafters.train.provenance import read_provenance, write_provenance


def test_a_machine_without_git_has_a_record_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The container image has none."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError):
        subprocess.run(["git", "--version"], check=False)
    write_provenance(tmp_path, ["aerie", "train"], 7, {"steps": 3})
    record = read_provenance(tmp_path)
    assert record is not None
    assert (record["git"], record["seed"], record["steps"]) == (None, 7, 3)
