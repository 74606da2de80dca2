"""Wait for something that has no event of its own to wait for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

IN_TIME_S = 60.0  # far more than anything takes on a busy machine
_PAUSE_S = 0.002


def until(
    happened: Callable[[], Any],
    within_s: float = IN_TIME_S,
    what: Callable[[], Any] | str = "",
    every_s: float = _PAUSE_S,
) -> float:
    """Seconds until `happened()` is true. The test fails with `what` if it is not `within_s`."""
    began = time.monotonic()
    while not happened():
        _fail_if_late(began, within_s, what)
        time.sleep(every_s)
    return time.monotonic() - began


async def soon(
    happened: Callable[[], Any], within_s: float = IN_TIME_S, what: Callable[[], Any] | str = ""
) -> float:
    """`until` on an event loop, which runs meanwhile."""
    began = time.monotonic()
    while not happened():
        _fail_if_late(began, within_s, what)
        await asyncio.sleep(_PAUSE_S)
    return time.monotonic() - began


def _fail_if_late(began: float, within_s: float, what: Callable[[], Any] | str) -> None:
    if time.monotonic() - began >= within_s:
        pytest.fail(f"not within {within_s} s: {what() if callable(what) else what}")
