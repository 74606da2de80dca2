"""Runs work that grows with a request's size off the event loop, in one thread.

Python runs one thread at a time: more of them would finish no sooner, and the event loop would wait
for the turn of each. A call that holds Python's global lock for long stalls the loop from any
thread, so sizes are bounded before work is handed over here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

# Up to this size the work takes about a millisecond, and a thread would cost more than it saves.
INLINE_BYTES = 8 * 1024

_worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="aerie-body")


async def run_sized(size: int, function: Callable[..., T], *args: Any) -> T:
    """Call `function`, in the worker thread if `size` (bytes of the request) is large."""
    if size <= INLINE_BYTES:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(_worker, function, *args)
