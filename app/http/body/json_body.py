"""Request bodies: content type, content encoding, limits, strict JSON."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

from fastapi import Request

from app.errors import ApiError
from app.http.body.content_encoding import Decoder, decoder_for
from app.http.body.limits import BodyLimits
from app.json_structure import INTEGERS, exceeded
from app.offload import run_sized

_SURROGATE = re.compile(r"[\ud800-\udfff]")
# What a model called a tool with, in Messages: it may be anything, and becomes text.
_CALL_INPUT = re.compile(r"messages\[\d+\]\.content\[\d+\]\.input")
# Places of JSON schemas. Their integers may have any length: a schema is text for the engine.
_SCHEMA = re.compile(
    r"tools\[\d+\]\.(tools\[\d+\]\.)?(function\.)?(parameters|input_schema)"
    r"|(response_format\.json_schema|(text|output_config)\.format)\.schema"
    r"|structured_outputs\.json"
)
_SCHEMA_NAMES = ("parameters", "input_schema", "schema", "json")
_SCHEMA_DEPTH = 6  # at most: tools[0].tools[0].function.parameters
# Maps every digit to 0: where there are 19 in a row, an integer may not fit into 64 bits.
_DIGITS_ALIKE = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_NUMBER = b"0" * 19
# Path to a JSON value: the path of its list or object, and its index or name there.
_JsonPath = tuple["_JsonPath | None", int | str]


async def read_json(
    request: Request, limits: BodyLimits, timeout_s: float, reserve: Callable[[int], None]
) -> tuple[dict[str, Any], int]:
    """The body as a JSON object within `limits`, and its size after decoding.

    `reserve` gets the size of each part that is kept. Raises ApiError 400, 408, 413 or 415, and
    what `reserve` raises.
    """
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(415, "Unsupported media type: send Content-Type: application/json.")
    decoder = decoder_for(request.headers.getlist("content-encoding"))
    try:
        async with asyncio.timeout(timeout_s):
            data = await _read(request, limits.size, reserve, decoder)
    except TimeoutError:
        # What is still on its way is not waited for.
        message = f"The body did not arrive within {timeout_s:g} s."
        raise ApiError(408, message, headers={"Connection": "close"}) from None
    return await run_sized(len(data), parse, data, limits), len(data)


def parse(data: bytes, limits: BodyLimits) -> dict[str, Any]:
    """A body's bytes as a JSON object. Raises ApiError 400."""
    broken = exceeded(data, limits.structure)
    if broken == "values":
        most = limits.structure.values
        raise ApiError(400, f"The body holds more than {most} JSON values.")
    if broken == "containers":
        most = limits.structure.containers
        raise ApiError(400, f"The body holds more than {most} JSON lists and objects.")
    try:
        payload = json.loads(data.decode("utf-8-sig"), parse_constant=_reject_constant)
    except RecursionError:
        raise ApiError(400, "The body is not usable JSON: nested too deeply.") from None
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.") from None
    if not isinstance(payload, dict):
        raise ApiError(400, "The body must be a JSON object.")
    if broken == "depth":
        raise _too_deep(payload, limits.structure.depth)
    if _LONG_NUMBER in data.translate(_DIGITS_ALIKE) or _holds_half_a_pair(data, payload):
        _refuse_unusable(payload)
    return payload


def _too_deep(payload: dict[str, Any], most: int) -> ApiError:
    """The refusal, with the name of the first field that nests too deeply."""
    for name, value in payload.items():
        level, depth = [value], 1  # a body's fields are one level down
        while level := [item for item in level if isinstance(item, list | dict)]:
            depth += 1
            if depth > most:
                message = f"'{name}' is nested too deeply: at most {most} levels in a body."
                return ApiError(400, message, param=name)
            level = [entry for item in level for entry in _entries(item)]
    # The field was sent twice, and only its last value is left.
    return ApiError(400, f"The body is nested more than {most} levels deep.")


def _entries(value: list[Any] | dict[str, Any]) -> list[Any]:
    return value if isinstance(value, list) else list(value.values())


def _holds_half_a_pair(data: bytes, payload: dict[str, Any]) -> bool:
    """Whether a string of the body holds half of a surrogate pair.

    Only an escape can write one. Encoding as UTF-8 finds it ten times as fast as a search of every
    string.
    """
    if b"\\ud" not in data and b"\\uD" not in data:
        return False
    try:
        json.dumps(payload, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _refuse_unusable(payload: dict[str, Any]) -> None:
    """Raise ApiError for values that are legal JSON but that the engine cannot hold.

    Goes level by level rather than by recursion: the depth is the client's choice.
    """
    depth = 0
    level: list[tuple[_JsonPath | None, Any, bool]] = [(None, payload, False)]
    while level:
        depth += 1
        deeper: list[tuple[_JsonPath | None, Any, bool]] = []
        for path, value, in_schema in level:
            problem = None
            if isinstance(value, str):
                if _SURROGATE.search(value):
                    problem = "it holds half of a surrogate pair, which is no character"
            elif isinstance(value, int):
                if value not in INTEGERS and not in_schema:
                    problem = "the integer does not fit into 64 bits"
            elif isinstance(value, list):
                deeper.extend(((path, index), item, in_schema) for index, item in enumerate(value))
            elif isinstance(value, dict):
                if any(_SURROGATE.search(key) for key in value):
                    problem = "a name in it holds half of a surrogate pair"
                deeper.extend(
                    (
                        (path, key),
                        item,
                        in_schema or (depth <= _SCHEMA_DEPTH and _is_schema(path, key)),
                    )
                    for key, item in value.items()
                    if not (key == "input" and _is_call_input(path, value))
                )
            if problem is not None:
                param = _path(path)
                message = f"Invalid value for '{param or 'body'}': {problem}."
                raise ApiError(400, message, param=param)
        level = deeper


def _is_call_input(path: _JsonPath | None, block: dict[str, Any]) -> bool:
    """Whether the `input` of a block at `path` is that of a call in a Messages request."""
    place = _path((path, "input"))
    return block.get("type") == "tool_use" and _CALL_INPUT.fullmatch(place or "") is not None


def _is_schema(path: _JsonPath | None, name: str) -> bool:
    """Whether a member of the object at `path` is a JSON schema."""
    return name in _SCHEMA_NAMES and _SCHEMA.fullmatch(_path((path, name)) or "") is not None


def _path(path: _JsonPath | None) -> str | None:
    """The path as OpenAI writes it, `messages[0].role`; None for the whole body."""
    parts: list[str] = []
    while path is not None:
        path, key = path
        parts.append(f"[{key}]" if isinstance(key, int) else f".{key}")
    return "".join(reversed(parts)).removeprefix(".") or None


async def _read(
    request: Request, limit: int, reserve: Callable[[int], None], decoder: Decoder | None
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
            reserve(len(part))
            data += part
            if len(data) > limit:
                raise too_large
            if decoder is not None:
                await asyncio.sleep(0)  # lets other requests run: a decompression bomb is large
    if decoder is not None:
        decoder.finish()
    return bytes(data)


def _reject_constant(name: str) -> NoReturn:
    """Raise ValueError for NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(f"{name} is not JSON")
