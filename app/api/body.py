"""Request bodies: size limit, content type, strict JSON."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from fastapi import Request

from app.errors import ApiError


async def read_json(request: Request, limit: int) -> dict[str, Any]:
    """The body as a JSON object of at most `limit` bytes. Raises ApiError 400, 413 or 415."""
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(415, "Unsupported media type: send Content-Type: application/json.")
    data = await _read(request, limit)
    try:
        payload = json.loads(data, parse_constant=_reject_constant)
    except RecursionError:
        raise ApiError(400, "The body is not usable JSON: nested too deeply.") from None
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.") from None
    if not isinstance(payload, dict):
        raise ApiError(400, "The body must be a JSON object.")
    return payload


async def _read(request: Request, limit: int) -> bytes:
    too_large = ApiError(413, f"The body is larger than {limit} bytes.")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise too_large
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > limit:
            raise too_large
    return bytes(data)


def _reject_constant(name: str) -> NoReturn:
    """NaN and Infinity are Python's, not JSON's."""
    raise ValueError(f"{name} is not JSON")
