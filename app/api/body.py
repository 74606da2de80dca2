"""Request bodies: content type, content encoding, size limit, strict JSON."""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from fastapi import Request

from app.api.content_encoding import Decoder, decoder_for
from app.errors import ApiError

# Only a body that matches can hold an unusable value; all others are spared the search for it.
_SUSPECT = re.compile(r"\\u[dD][89a-fA-F]|[0-9]{19}")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_INTEGERS = range(-(2**63), 2**63)


async def read_json(
    request: Request, limit: int, timeout_s: float, hold: Callable[[int], None]
) -> tuple[dict[str, Any], int]:
    """The body as a JSON object of at most `limit` bytes, and its size after decoding.

    `hold` is told the size of each part that is kept. Raises ApiError 400, 408, 413 or 415, and
    what `hold` raises.
    """
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(415, "Unsupported media type: send Content-Type: application/json.")
    decoder = decoder_for(request.headers.getlist("content-encoding"))
    try:
        async with asyncio.timeout(timeout_s):
            data = await _read(request, limit, hold, decoder)
    except TimeoutError:
        # What is still on its way is not waited for.
        message = f"The body did not arrive within {timeout_s:g} s."
        raise ApiError(408, message, headers={"Connection": "close"}) from None
    try:
        text = data.decode("utf-8-sig")
        payload = json.loads(text, parse_constant=_reject_constant)
    except RecursionError:
        raise ApiError(400, "The body is not usable JSON: nested too deeply.") from None
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.") from None
    if not isinstance(payload, dict):
        raise ApiError(400, "The body must be a JSON object.")
    if _SUSPECT.search(text):
        _refuse_unusable(payload)
    return payload, len(data)


def _refuse_unusable(payload: dict[str, Any]) -> None:
    """Values that are legal JSON and that no part of an engine can hold. Breadth first: the
    depth is the client's choice."""
    waiting: deque[tuple[str, Any]] = deque([("", payload)])
    while waiting:
        path, value = waiting.popleft()
        problem = None
        if isinstance(value, str) and _SURROGATE.search(value):
            problem = "half of a surrogate pair is no character"
        elif isinstance(value, int) and value not in _INTEGERS:
            problem = "the integer does not fit into 64 bits"
        elif isinstance(value, list):
            waiting.extend((f"{path}[{index}]", item) for index, item in enumerate(value))
        elif isinstance(value, dict):
            if any(_SURROGATE.search(key) for key in value):
                problem = "a name in it holds half of a surrogate pair"
            waiting.extend((f"{path}.{key}" if path else key, item) for key, item in value.items())
        if problem is not None:
            name = path or "body"
            raise ApiError(400, f"Invalid value for '{name}': {problem}.", param=path or None)


async def _read(
    request: Request, limit: int, hold: Callable[[int], None], decoder: Decoder | None
) -> bytes:
    """The decoded body. `limit` holds for what is sent and for what becomes of it."""
    too_large = ApiError(413, f"The body is larger than {limit} bytes.")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise too_large
    data, sent = bytearray(), 0
    async for chunk in request.stream():
        sent += len(chunk)
        if sent > limit:
            raise too_large
        for part in (chunk,) if decoder is None else decoder.decode(chunk):
            hold(len(part))
            data += part
            if len(data) > limit:
                raise too_large
            if decoder is not None:
                await asyncio.sleep(0)  # other requests have their turn: a bomb is large
    if decoder is not None:
        decoder.finish()
    return bytes(data)


def _reject_constant(name: str) -> NoReturn:
    """NaN and Infinity are Python's, not JSON's."""
    raise ValueError(f"{name} is not JSON")
