"""Compressed bodies: decoded within the limits of plain ones, or refused by name."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import Request

from app.errors import ApiError
from app.http.body.content_encoding import PART_BYTES
from app.http.body.json_body import read_json
from app.http.body.limits import BodyLimits
from app.json_structure import Bounds

LIMIT = 2**20
PAYLOAD = {"prompt": "h\u00e9llo " * 50, "max_tokens": 1}
BODY = json.dumps(PAYLOAD).encode()


class Sent:
    """A request whose body comes in given pieces; knows what was read and held."""

    def __init__(self, body: bytes, *encodings: str, piece: int = 1000, declared: int = 0) -> None:
        self._pieces = [body[i : i + piece] for i in range(0, len(body), piece)]
        self.read = 0
        self.held: list[int] = []
        names = [(b"content-encoding", name.encode("latin-1")) for name in encodings]
        length = [(b"content-length", b"%d" % declared)] if declared else []
        headers = [(b"content-type", b"application/json"), *names, *length]
        self._request = Request({"type": "http", "headers": headers}, self._receive)

    async def _receive(self) -> dict[str, Any]:
        piece = self._pieces[self.read] if self.read < len(self._pieces) else b""
        self.read += 1
        more = self.read < len(self._pieces)
        return {"type": "http.request", "body": piece, "more_body": more}

    def json(self, limit: int = LIMIT) -> tuple[dict[str, Any], int]:
        limits = BodyLimits(limit, Bounds(10**6, 10**6, 100))
        return asyncio.run(read_json(self._request, limits, 30.0, self.held.append))

    def refusal(self, limit: int = LIMIT) -> ApiError:
        with pytest.raises(ApiError) as caught:
            self.json(limit)
        return caught.value


def empty_blocks(count: int) -> bytes:
    """A gzip body that goes on for ever and decodes to nothing."""
    deflate = zlib.compressobj(wbits=31)
    start = deflate.flush(zlib.Z_SYNC_FLUSH)
    return start + b"\x00\x00\x00\xff\xff" * count


ENCODINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "GZip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "identity": bytes,
    "": bytes,
}


@pytest.mark.parametrize("piece", [1, 7, 10**6])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_body_is_decoded(encoding: str, piece: int) -> None:
    sent = Sent(ENCODINGS[encoding](BODY), encoding, piece=piece)
    assert sent.json() == (PAYLOAD, len(BODY))
    assert sum(sent.held) == len(BODY), "what stays in memory is the decoded body"


@pytest.mark.parametrize("size", [1, 63, 64, 65, 257, 258, 259, PART_BYTES])
def test_no_length_of_a_body_is_odd(size: int) -> None:
    """Parts of the decoder's output end anywhere, in the middle of a match too."""
    for extra in range(-3, 4):
        payload = {"p": "x" * (PART_BYTES + size + extra)}
        sent = Sent(gzip.compress(json.dumps(payload).encode()), "gzip", piece=11)
        assert sent.json()[0] == payload


@pytest.mark.parametrize(
    "names",
    [
        ("br",), ("zstd",), ("compress",), ("gzip, gzip",), ("gzip", "deflate"), ("*",),
        ("gzip;q=1",), ("x" * 9999,),
    ],
)  # fmt: skip
def test_another_encoding_is_refused_by_name(names: tuple[str, ...]) -> None:
    sent = Sent(BODY, *names)
    error = sent.refusal()
    assert error.status == 415
    assert names[0][:50] in error.message
    assert "gzip" in error.message and "deflate" in error.message
    assert error.headers == {"Accept-Encoding": "gzip, deflate"}
    assert len(error.message) < 300
    assert sent.read == 0


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_that_is_not_what_it_says(encoding: str) -> None:
    whole = ENCODINGS[encoding](BODY)
    wrong_check = whole[:-8] + bytes(8) if encoding == "gzip" else whole[:-4] + bytes(4)
    for body in (
        BODY, b"", whole[:1], whole[:-1], whole + b"x", whole + whole, wrong_check,
        b"\x28\xb5\x2f\xfd" + whole, random.Random(1).randbytes(500),
    ):  # fmt: skip
        error = Sent(body, encoding).refusal()
        assert error.status == 400
        assert encoding in error.message


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_bomb_is_refused_at_the_limit(encoding: str) -> None:
    """A thousandfold: 32 KiB that would become 32 MiB."""
    bomb = ENCODINGS[encoding](b" " * 2**25)
    assert len(bomb) < LIMIT // 16
    for piece in (4096, len(bomb)):
        sent = Sent(bomb, encoding, piece=piece)
        assert sent.refusal().status == 413
        assert LIMIT < sum(sent.held) <= LIMIT + PART_BYTES
        assert max(sent.held) <= PART_BYTES
        assert sent.read <= max(1, 2 * LIMIT // (piece * 1000) + 2), "it was read on"


def test_what_is_sent_has_the_limit_of_what_it_becomes() -> None:
    """Blocks that decode to nothing would never end otherwise."""
    sent = Sent(empty_blocks(LIMIT // 5 + 1000), "gzip", piece=4096)
    assert sent.refusal().status == 413
    assert sum(sent.held) == 0
    assert Sent(b"", "gzip", declared=LIMIT + 1).refusal().status == 413


def test_all_bodies_together_have_theirs() -> None:
    """What `hold` raises ends the decoding."""
    sent = Sent(gzip.compress(b" " * LIMIT), "gzip")

    def full(size: int) -> None:
        raise ApiError(429, "full")

    sent.held = type("Full", (list,), {"append": staticmethod(full)})()
    assert sent.refusal().status == 429


def test_a_decoded_body_is_checked_like_any_other() -> None:
    for body in (b"[]", b"{", b'{"a": NaN}', rb'{"a": "\ud800"}', b"\xff"):
        assert Sent(gzip.compress(body), "gzip").refusal().status == 400
