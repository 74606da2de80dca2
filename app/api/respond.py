"""One request from JSON body to response, the same way for every operation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from app.api.body import read_json
from app.api.streaming import EventResponse, EventStream
from app.engine.supervisor import Engine
from app.settings import Settings

CLIENT_CLOSED_REQUEST = 499


async def respond(request: Request, operation: str) -> Response:
    """Read the body and answer it with the named operation."""
    return await answer(request, operation, await read_payload(request))


async def read_payload(request: Request) -> dict[str, Any]:
    """The body as a JSON object, within the limit of the settings."""
    settings: Settings = request.app.state.settings
    return await read_json(request, int(settings.server.max_body_mib * 2**20))


async def answer(request: Request, name: str, payload: dict[str, Any]) -> Response:
    """The response to a decoded body. A client that leaves ends the generation."""
    engine: Engine = request.app.state.engine
    settings: Settings = request.app.state.settings
    operation = engine.operation(name)

    async def work() -> Response:
        fields = dict(payload)  # checks drop fields; errors name them as sent
        reply = await operation(fields)
        if isinstance(reply.answer, dict):
            return JSONResponse(reply.answer)
        stream = EventStream(reply.answer, settings.server.sse_keep_alive_s)
        try:
            error = await stream.begin(reply.first)
        except asyncio.CancelledError:
            await stream.close()
            raise
        except Exception as broken:
            error = broken
        if error is not None:
            await stream.close()
            raise operation.failure(error, payload, reply.first) from error
        return EventResponse(stream)

    return await _unless_disconnected(request, work())


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The work's response, or 499 (which nobody reads) once the client has gone.

    The body has been read, so the next message that can arrive is the disconnect.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
