"""One request from JSON body to response, the same way for every operation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from app.api.body import read_json
from app.api.body_limits import body_limits
from app.api.door import total_s
from app.api.responses import Turn, resume
from app.api.streaming import EventResponse, EventStream
from app.api.visit import visit_of
from app.engine.supervisor import Engine
from app.errors import ApiError
from app.settings import Settings

CLIENT_CLOSED_REQUEST = 499


# Operations that ask the tokenizer only: their request pays for its own tokens and for no output.
NO_GENERATION = frozenset({"count_tokens", "tokenize", "detokenize"})


@dataclass(frozen=True)
class Body:
    """A decoded body, and its size in bytes after the content encoding is undone."""

    payload: dict[str, Any]
    size: int


async def respond(request: Request, operation: str) -> Response:
    """Read the body and answer it with the named operation."""
    return await answer(request, operation, await read_body(request))


async def read_body(request: Request) -> Body:
    """The body as a JSON object, within the limits of the settings."""
    settings: Settings = request.app.state.settings
    engine: Engine = request.app.state.engine
    limits = body_limits(settings, engine.max_model_len, engine.takes_media)
    hold = visit_of(request.scope).hold
    return Body(*await read_json(request, limits, settings.server.body_timeout_s, hold))


async def answer(request: Request, name: str, body: Body) -> Response:
    """The response to a decoded body. A client that leaves, or a deadline, ends the generation."""
    engine: Engine = request.app.state.engine
    settings: Settings = request.app.state.settings
    operation = engine.operation(name)
    visit = visit_of(request.scope)
    await visit.begin(total_s(request.scope, request.app.state.admission))
    deadline = visit.deadline
    assert deadline is not None

    async def work() -> Response:
        payload, size = body.payload, body.size
        turn: Turn | None = None
        if name == "responses":
            turn = resume(request.app.state.responses, visit.identity.tenant.name, payload)
            payload, size = turn.payload, size + turn.earlier_bytes
            visit.hold(turn.earlier_bytes)
        output_limit = operation.output_limit if name not in NO_GENERATION else None
        await visit.admit(payload, size, settings.served_model_name, output_limit)
        fields = dict(payload)  # checks drop fields; errors name them as sent
        reply = await operation(fields, size)
        if isinstance(reply.answer, dict):
            visit.leave()
            told = {"server-timing": visit.timing(), **visit.speculation()}
            whole = reply.answer if turn is None else turn.finish(reply.answer)
            return JSONResponse(whole, headers=told)
        events = reply.answer if turn is None else turn.stream(reply.answer)
        stream = EventStream(events, settings.server.sse_keep_alive_s, visit.leave)
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
        stream.cut_at(deadline.expired, operation.event)
        return EventResponse(stream, {"server-timing": visit.timing()})

    return await _in_time(request, work(), deadline.expired)


async def _in_time(
    request: Request, work: Coroutine[Any, Any, Response], expired: asyncio.Future[ApiError]
) -> Response:
    """The work's response, the error of a deadline that came first, or 499 (which nobody
    reads) once the client has gone.

    The body has been read, so the next message that can arrive is the disconnect.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(request.receive())
    try:
        first: set[asyncio.Future[Any]] = {task, watcher, expired}
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if expired.done():
            raise expired.result()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
