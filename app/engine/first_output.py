"""When has a request produced its first token, or failed before it?

vLLM validates sampling parameters and grammars inside `generate`, which runs only once
somebody iterates the stream: too late for a status code if the headers are out. Each
HTTP request therefore carries a FirstOutput that the engine settles, and the response
waits for it before it sends headers (app/api/streaming.py).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass
class FirstOutput:
    """Settled once: by the engine's first output or by the error that came instead."""

    settled: bool = False
    error: BaseException | None = None
    late: BaseException | None = None  # an error after the first output

    @property
    def answered(self) -> bool:
        """Whether the engine has begun to answer, so that the request itself was good."""
        return self.settled and self.error is None


_current: ContextVar[FirstOutput | None] = ContextVar("first_output", default=None)


def expect() -> FirstOutput:
    """Start watching for the current task and the tasks it creates."""
    first = FirstOutput()
    _current.set(first)
    return first


async def watched(outputs: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The same outputs, settling the current FirstOutput on the way."""
    first = _current.get()
    try:
        async for output in outputs:
            if first is not None:
                first.settled = True
            yield output
    except Exception as error:
        if first is not None and first.answered:
            first.late = error
        elif first is not None and not first.settled:
            first.settled, first.error = True, error
        raise
    finally:
        await outputs.aclose()
