"""Facts about this machine, where reading them is not plain."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.doctor import machine_facts


def test_an_old_driver_is_asked_again_without_the_capability(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(query: Sequence[str], **_: Any) -> SimpleNamespace:
        if "compute_cap" in query[1]:
            raise subprocess.CalledProcessError(2, query)
        return SimpleNamespace(stdout="0, GPU-0, Tesla T4, 15360, 14900, [N/A], 470.82.01\n")

    monkeypatch.setattr(subprocess, "run", run)
    (gpu,) = machine_facts.gpu_devices()
    assert (gpu.name, gpu.driver, gpu.capability) == ("Tesla T4", "470.82.01", None)


def test_the_disk_of_a_folder_that_is_not_there_is_that_of_the_nearest_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / "none" / "none", Path("none/none")):
        free_gib, nearest = machine_facts.free_disk(folder)
        assert nearest == str(tmp_path) and free_gib > 0.0
