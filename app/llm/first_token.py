"""First-token state of a request: its first token has come, or an error came instead.

vLLM validates sampling parameters and grammars inside `generate`, which runs only once the stream
is iterated: too late for a status code if the headers are out. Each HTTP request therefore has a
FirstToken that the engine settles, and the response waits for it before it sends headers
(app/http/streaming.py).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass
class FirstToken:
    """State that is settled once: by the engine's first output or by an error before it."""

    settled: bool = False
    error: BaseException | None = None
    late: BaseException | None = None  # an error after the first token

    @property
    def answered(self) -> bool:
        """Whether the engine has begun to answer, so that the request itself was good."""
        return self.settled and self.error is None


_current: ContextVar[FirstToken | None] = ContextVar("first_token", default=None)


def watch_first_token() -> FirstToken:
    """Create the FirstToken of the current task and the tasks that it creates."""
    first = FirstToken()
    _current.set(first)
    return first


async def settle_first_token(outputs: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Pass the outputs on. The first one, or an error, settles the current FirstToken."""
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
