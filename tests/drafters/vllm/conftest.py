"""Tests of what runs inside vLLM need vLLM, and those of its V2 model runner Triton, which some
platforms lack. Those with replicas of architectures run only if `-m replicas` asks for them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

collect_ignore_glob = [
    files for files, needed in (("*", "vllm"), ("v2/*", "triton")) if find_spec(needed) is None
]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "replicas" in config.getoption("markexpr"):
        return
    skip = pytest.mark.skip(reason="minutes of engines: run them with -m replicas")
    for item in items:
        if item.get_closest_marker("replicas"):
            item.add_marker(skip)
