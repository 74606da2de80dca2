"""Handles a request to any endpoint: JSON body, admission, engine, response."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from app.admission.estimate import Estimate, estimate, estimate_tokenizing
from app.declaration.endpoint import Endpoint
from app.engine.supervisor import Engine
from app.errors import ApiError
from app.http.auth import timeout_of
from app.http.body.json_body import read_json
from app.http.body.limits import BodyLimits, body_limits
from app.http.errors import CLIENT_CLOSED_REQUEST
from app.http.request_context import context_of
from app.http.streaming import EventResponse, EventStream
from app.offload import run_sized
from app.routes.stored_responses import Turn, resume
from app.settings import Settings
from app.validation.output_limit import OutputLimit
from app.validation.size_limits import check_choices, count_sequences


@dataclass(frozen=True)
class Body:
    """A decoded body, and its size in bytes after the content encoding is undone."""

    payload: dict[str, Any]
    size: int


async def handle(request: Request, endpoint: Endpoint) -> Response:
    """Read the body and answer it as the endpoint does."""
    refuse_until_ready(request, endpoint)
    return await handle_body(request, endpoint, await read_body(request))


def refuse_until_ready(request: Request, endpoint: Endpoint) -> None:
    """Raise ApiError 503 while the engine is not ready.

    The limits of a body follow from the model's context, which is not known until then.
    """
    engine: Engine = request.app.state.engine
    engine.operation(endpoint.name)


async def read_body(request: Request) -> Body:
    """The body as a JSON object, within the limits of the settings.

    Raises ApiError 503 or 504 if the request's deadline passes, or the gateway stops, before the
    body is there.
    """
    settings: Settings = request.app.state.settings
    context, timeout_s = context_of(request.scope), settings.server.body_timeout_s
    reading = asyncio.ensure_future(
        read_json(request, _limits(request), timeout_s, context.reserve_body_bytes)
    )
    try:
        if context.deadline is not None:
            first: set[asyncio.Future[Any]] = {reading, context.deadline.expired}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                error = context.deadline.expired.result()
                # What is still on its way is not waited for.
                error.headers = {**(error.headers or {}), "Connection": "close"}
                raise error
        return Body(*await reading)
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


def _limits(request: Request) -> BodyLimits:
    engine: Engine = request.app.state.engine
    return body_limits(request.app.state.settings, engine.max_model_len, engine.takes_media)


async def handle_body(request: Request, endpoint: Endpoint, body: Body) -> Response:
    """The response to a decoded body. It ends if the client leaves or at a deadline."""
    engine: Engine = request.app.state.engine
    settings: Settings = request.app.state.settings
    operation = engine.operation(endpoint.name)
    context = context_of(request.scope)
    await context.begin(timeout_of(request.scope, request.app.state.admission))
    deadline = context.deadline
    assert deadline is not None

    async def work() -> Response:
        payload, size = body.payload, body.size
        turn: Turn | None = None
        if endpoint.continues_responses:
            resumed = await resume(
                request.app.state.responses,
                context.identity.tenant.name,
                payload,
                size,
                settings.limits.max_input_items,
                _limits(request).structure,
                context.reserve_body_bytes,
            )
            payload, size = resumed.payload, resumed.size
            turn = resumed if endpoint.keeps_responses else None
        cost = _cost(endpoint, payload, size, operation.output_limit, settings)
        await context.admit(payload.get("model") or settings.served_model_name, cost)
        context.usage.max_alternatives = settings.limits.alternatives(engine.max_model_len)
        reply = await operation(payload, size)
        if isinstance(reply.answer, dict):
            context.release_slot()
            headers = {"server-timing": context.server_timing(), **context.speculation_headers()}
            length = context.usage.answer_bytes
            whole = reply.answer if turn is None else await turn.finish(reply.answer, length)
            return await run_sized(length, partial(JSONResponse, whole, headers=headers))
        events = reply.answer if turn is None else turn.stream(reply.answer)
        stream = EventStream(events, settings.server.sse_keep_alive_s, context.settle)
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

        def as_event(error: ApiError, sequence_number: int) -> str:
            event = operation.event(error, sequence_number)
            return event if turn is None else turn.failed(event)

        stream.cut_at(deadline.expired, as_event)
        return EventResponse(stream, {"server-timing": context.server_timing()})

    response = await _in_time(request, work(), deadline.expired)
    if not isinstance(response, EventResponse):
        context.stop_deadlines()
    return response


def _cost(
    endpoint: Endpoint,
    payload: Mapping[str, Any],
    size: int,
    output_limit: OutputLimit,
    settings: Settings,
) -> Estimate:
    """Estimated cost of a body that has passed no check yet.

    Raises ApiError 400 if it asks for more sequences than any request may have.
    """
    if not endpoint.generates:
        return estimate_tokenizing(size)
    asked = {name: payload[name] for name in endpoint.sequence_fields if name in payload}
    check_choices(asked, settings.limits)
    output_tokens = output_limit.of(payload, settings.admission.assumed_output_tokens)
    return estimate(size, output_tokens, count_sequences(asked))


async def _in_time(
    request: Request, work: Coroutine[Any, Any, Response], expired: asyncio.Future[ApiError]
) -> Response:
    """The response of `work`, or the error of a deadline that expires first.

    Once the client has gone it is a 499, which nobody reads.

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
