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
    while _look(happened, began, within_s, what):
        time.sleep(every_s)
    return time.monotonic() - began


async def soon(
    happened: Callable[[], Any], within_s: float = IN_TIME_S, what: Callable[[], Any] | str = ""
) -> float:
    """`until` on an event loop, which runs meanwhile."""
    began = time.monotonic()
    while _look(happened, began, within_s, what):  # noqa: ASYNC110 (there is no event)
        await asyncio.sleep(_PAUSE_S)
    return time.monotonic() - began


async def let_pass(seconds: float) -> None:
    """Put the clock of the running event loop forward, and let what is due happen: a deadline
    strikes when the test has come so far, and not when the machine has paused before."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]
    await asyncio.sleep(0.02)


def _look(
    happened: Callable[[], Any], began: float, within_s: float, what: Callable[[], Any] | str
) -> bool:
    """Whether to look again. Only a look that begins too late fails: a pause of this process may
    come between one and the clock."""
    late = time.monotonic() - began >= within_s
    if happened():
        return False
    if late:
        pytest.fail(f"not within {within_s} s: {what() if callable(what) else what}")
    return True
