"""GET and PATCH /v1/speculation: the policy's state, and an admin's changes at run time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable
from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel

from app.engine.supervisor import Engine
from app.errors import ApiError
from app.http.admin import admin_only
from app.routes.request_handler import read_body
from app.validation import field_checks

router = APIRouter()

PATH = "/v1/speculation"
Answer = TypeVar("Answer")
# The engine answers between two steps. One that hangs is replaced after `hang_timeout_s`.
ANSWER_WITHIN_S = 10.0


class Changes(BaseModel):
    """The fields that may be changed at run time. The policy checks their values."""

    objective: str = ""
    k: int = 0
    tpot_s: float = 0.0
    sources: list[str] = []
    generation: int | str = "auto"


@router.get(PATH)
async def state(request: Request) -> dict[str, Any]:
    """The policy's state (Controller.snapshot) and the speed-up of the last 1, 5, 15 minutes.

    `path` is how the engine was started, `fallback` why that was not the first choice, and
    `absent_sources` are the sources of drafts that it lacks on this path. `head` says which
    generation of a head that learns drafts, and what is known of a trial; null without `--learn`.
    """
    engine: Engine = request.app.state.engine
    if not engine.settings_in_force.speculates:
        return {"enabled": False, **_start(engine)}
    state = await _in_time(engine.running_speculation().state())
    return {"enabled": True, **_start(engine), **state}


@router.patch(PATH, dependencies=[Depends(admin_only)])
async def steer(request: Request) -> dict[str, Any]:
    """Change `objective`, its `k` or `tpot_s`, or the `sources` of drafts where K is adaptive, of
    which an empty list stands for all; or pin a `generation` of the head by its number, with "auto"
    letting trials choose again. Answers with the new state."""
    engine: Engine = request.app.state.engine
    changes = (await read_body(request)).payload
    field_checks.check_fields(changes, Changes, {})
    field_checks.check_scalars(changes, Changes)
    field_checks.check_containers(changes, Changes)
    if not changes:
        raise ApiError(400, f"Nothing to change: give one of {', '.join(Changes.model_fields)}.")
    if not engine.settings_in_force.speculates:
        raise ApiError(400, "This gateway was started without a drafter.", param="objective")
    speculation = engine.running_speculation()
    if "generation" in changes:
        if len(changes) > 1:
            message = "'generation' is changed in a request of its own."
            raise ApiError(400, message, param="generation")
        await _in_time(engine.running_heads().pin(_generation(changes["generation"])))
        state = await _in_time(speculation.state())
    else:
        state = await _in_time(speculation.steer(changes))
    return {"enabled": True, **_start(engine), **state}


def _generation(value: int | str) -> int | None:
    """The number of a generation, or None for "auto". Raises ApiError 400 for other values."""
    if value == "auto":
        return None
    if isinstance(value, str | bool) or value < 0:
        message = f"'generation' is a number from 0 or \"auto\", got {value!r}."
        raise ApiError(400, message, param="generation")
    return value


def _start(engine: Engine) -> dict[str, Any]:
    """How the engine was started, and the generation of its head."""
    fallback = None if engine.fallback is None else asdict(engine.fallback)
    absent = () if engine.path is None else engine.path.absent_sources(engine.settings)
    heads = engine.swappable_heads
    return {
        "path": engine.path,
        "fallback": fallback,
        "absent_sources": list(absent),
        "head": None if heads is None else heads.state(),
    }


async def _in_time(answer: Awaitable[Answer]) -> Answer:
    """The engine's answer. Raises ApiError 503 when it takes too long."""
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            return await answer
    except TimeoutError:
        message = (
            f"The engine did not answer within {ANSWER_WITHIN_S:g} s; a change may still be made."
        )
        headers = {"Retry-After": str(math.ceil(ANSWER_WITHIN_S))}
        raise ApiError(503, message, code="engine_busy", headers=headers) from None
