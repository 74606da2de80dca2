"""Work on a request that grows with its size, off the event loop.

One thread, as Python runs one thread at a time: more would finish no sooner, and each would take
its turn before the event loop has its own. What holds Python's global lock for long stalls the
loop from any thread, so sizes are bounded before work is handed over here.
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
    """`function`'s result; in the worker thread if `size`, in bytes of a request, is large."""
    if size <= INLINE_BYTES:
        return function(*args)
    return await asyncio.get_running_loop().run_in_executor(_worker, function, *args)
