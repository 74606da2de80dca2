"""Tests with replicas of architectures run only if `-m replicas` asks for them."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "replicas" in config.getoption("markexpr"):
        return
    skip = pytest.mark.skip(reason="minutes of engines: run them with -m replicas")
    for item in items:
        if item.get_closest_marker("replicas"):
            item.add_marker(skip)
