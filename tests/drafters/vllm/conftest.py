"""Tests of what runs inside vLLM need vLLM, and those of its V2 model runner Triton, which some
platforms lack. Those with replicas of architectures run only if `-m replicas` asks for them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
NEEDED = (("vllm", HERE), ("triton", HERE / "v2"))
LACKING = [(name, folder) for name, folder in NEEDED if find_spec(name) is None]


class Skipped(pytest.Module):
    """A module of tests that cannot even be imported."""

    def collect(self) -> Any:
        lacking = [name for name, folder in LACKING if self.path.is_relative_to(folder)]
        pytest.skip(f"{lacking[0]} is not installed", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> Skipped | None:
    if any(module_path.is_relative_to(folder) for _, folder in LACKING):
        return Skipped.from_parent(parent, path=module_path)
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "replicas" in config.getoption("markexpr"):
        return
    skip = pytest.mark.skip(reason="minutes of engines: run them with -m replicas")
    for item in items:
        if item.get_closest_marker("replicas"):
            item.add_marker(skip)
