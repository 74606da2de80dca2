"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_settings() -> Iterator[None]:
    """The caller's settings are the caller's: no gateway that a test starts reads them. What
    tests themselves are told by variables they read when they are collected, before this."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith(("AERIE_", "SM_VLLM_"))]:
            patch.delenv(name)
        yield
