"""Server-sent events: errors before headers, keep-alive comments, nothing left running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Protocol

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from app.errors import ApiError

KEEP_ALIVE = ": keep-alive\n\n"
# Events that may wait for a slow reader; beyond them the engine's outputs merge upstream.
BUFFERED_EVENTS = 64


class FirstTokenState(Protocol):
    """Whether a stream has its first token or an error (app.llm.first_token)."""

    settled: bool
    error: BaseException | None


class EventStream:
    """A stream of event texts, pulled by its own task into a bounded queue.

    The task keeps the keep-alive timeout from cancelling the generation. `close` ends both and must
    be called.
    """

    def __init__(
        self,
        events: AsyncIterator[str],
        keep_alive_s: float,
        on_end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`on_end` is called once nothing is generated any more, read or not. The stream's end is
        not read before it is done."""
        self._events = events
        self._keep_alive_s = keep_alive_s
        self._on_end = on_end
        self._count = 0
        self._generated = False
        self._queue: asyncio.Queue[str | Exception | None] = asyncio.Queue(BUFFERED_EVENTS)
        self._last: str | None = None  # comes after everything in the queue
        self._head: list[str] = []
        self._ended = False
        self._pump = asyncio.create_task(self._pull())

    async def _pull(self) -> None:
        end: Exception | None = None
        try:
            async for event in self._events:
                await self._queue.put(event)
                self._count += 1
        except Exception as error:
            end = error
        finally:
            if isinstance(self._events, AsyncGenerator):
                await self._events.aclose()
            self._generated = True
            if self._on_end is not None:
                await self._on_end()
        await self._queue.put(end)

    async def _next(self) -> str | None:
        """The next event, or None at the end; raises what the stream raised."""
        if self._last is not None and self._queue.empty():
            self._ended = True
            return self._last
        item = await self._queue.get()
        self._ended = not isinstance(item, str)
        if isinstance(item, Exception):
            raise item
        return item

    async def begin(self, first: FirstTokenState) -> BaseException | None:
        """Hold events back until the first token exists; returns the error that came instead.

        Gives up waiting after the keep-alive time: a long queue must not look like a dead
        server, and a request that is queued has been validated.
        """
        try:
            async with asyncio.timeout(self._keep_alive_s):
                while not first.settled and (event := await self._next()) is not None:
                    self._head.append(event)
        except TimeoutError:
            pass
        return first.error

    async def body(self) -> AsyncGenerator[str, None]:
        """The events, and a comment whenever there was none for the keep-alive time."""
        for held_back in self._head:
            yield held_back
        while not self._ended:
            try:
                async with asyncio.timeout(self._keep_alive_s):
                    event = await self._next()
            except TimeoutError:
                yield KEEP_ALIVE
                continue
            if event is not None:
                yield event

    def cut_at(
        self, moment: asyncio.Future[ApiError], as_event: Callable[[ApiError, int], str]
    ) -> None:
        """End the generation when `moment` has an error, which becomes the last event.

        Every event that the reader has not taken yet comes before it.
        """

        def cut(moment: asyncio.Future[ApiError]) -> None:
            if moment.cancelled() or self._generated:
                return
            self._pump.cancel()
            last = as_event(moment.result(), self._count)
            if self._queue.empty():  # the reader may be waiting for it
                self._queue.put_nowait(last)
                self._queue.put_nowait(None)
            else:  # there may be no room, and no event is dropped to make some
                self._last = last

        moment.add_done_callback(cut)

    async def close(self) -> None:
        """Stop the generation if it still runs, and wait until it has stopped."""
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)


class EventResponse(StreamingResponse):
    """A StreamingResponse that closes its stream however it ends, started or not."""

    def __init__(self, stream: EventStream, headers: Mapping[str, str]) -> None:
        super().__init__(
            stream.body(),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers},
        )
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._stream.close()
