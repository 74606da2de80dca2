"""Background tasks whose unexpected ends are logged, counted and followed by a restart.

The exception of an asyncio task that nobody awaits is lost, and its work stops unnoticed. So
whatever the gateway does periodically runs in a BackgroundTask.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Literal, Self

from app.observability import metrics

logger = logging.getLogger(__name__)

FIRST_RETRY_S, MAX_RETRY_S = 0.5, 30.0

State = Literal["stopped", "running", "waiting"]


class BackgroundTask:
    """Keeps `work` running: if it raises or returns, that is logged and counted, and it is started
    again, after `first_retry_s` seconds and then after twice as long each time, up to
    `max_retry_s`. Work that has run for twice that long has recovered: its next restart waits
    `first_retry_s` again.

    As an async context manager it runs in a task of its own; `run` is for callers that await it.
    Exceptions of the types in `final` are meant to end the work, and are raised.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], Awaitable[None]],
        *,
        final: tuple[type[Exception], ...] = (),
        first_retry_s: float = FIRST_RETRY_S,
        max_retry_s: float = MAX_RETRY_S,
    ) -> None:
        self.name = name
        self.state: State = "stopped"
        self.failures = 0
        self._work = work
        self._final = final
        self._first_retry_s = first_retry_s
        self._max_retry_s = max_retry_s
        self._task: asyncio.Task[None] | None = None

    @property
    def detail(self) -> dict[str, Any]:
        """State and failures for the readiness report, which is public: errors are left out."""
        return {"state": self.state, "failures": self.failures}

    async def run(self) -> None:
        """Keep the work running until cancelled, or until it raises one of `final`."""
        clock = asyncio.get_running_loop().time
        retry_s = self._first_retry_s
        try:
            while True:
                self.state, began = "running", clock()
                problem: BaseException | None = None
                try:
                    await self._work()
                except self._final:
                    raise
                except asyncio.CancelledError as error:
                    if is_being_cancelled():
                        raise
                    problem = error  # raised by something that the work awaited
                except Exception as error:
                    problem = error
                self.failures += 1
                metrics.BACKGROUND_FAILURES.labels(self.name).inc()
                if clock() - began >= 2 * self._max_retry_s:
                    retry_s = self._first_retry_s
                logger.error(
                    "the background task %s ended unexpectedly (%s); it is started again in %.1f s",
                    self.name,
                    "it returned" if problem is None else repr(problem),
                    retry_s,
                    exc_info=problem,
                )
                self.state = "waiting"
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, self._max_retry_s)
        finally:
            self.state = "stopped"

    async def __aenter__(self) -> Self:
        """Start the task in the running event loop."""
        self._task = asyncio.create_task(self.run(), name=self.name)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Cancel the task, and wait until it has ended."""
        assert self._task is not None
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


def is_being_cancelled() -> bool:
    """Whether a CancelledError in the current task is meant for it, and not raised by something
    that it awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
