"""Requests that offer another protocol: they are answered over HTTP/1.1 (RFC 9110, section 7.8)."""

from __future__ import annotations

import asyncio

import pytest

from tests.app.server.test_connection import PLENTY_S, SHORT_S, refusal, serving

H2C = (
    b"Connection: Upgrade, HTTP2-Settings\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\n"
)
OFFERS = {
    "Java": H2C,
    "lower case": H2C.lower(),
    "upper case": H2C.upper(),
    "kept alive": b"Connection: keep-alive, Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n",
    "two protocols": b"Upgrade: h2c, TLS/1.2\r\nConnection: upgrade\r\n",
    "two headers": b"Upgrade: h2c\r\nConnection: close\r\nUpgrade: x\r\nConnection: Upgrade\r\n",
    "WebSocket": b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
    "of a proxy": b"Connection: upgrade\r\nUpgrade: $http_upgrade\r\nVia: 1.1 nginx\r\n",
    "expecting": H2C + b"Expect: 100-continue\r\n",
}
BODIES = {
    "a length": b"Content-Length: 5\r\n\r\nab\r\n\r",
    "chunks": b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n3\r\n\r\n\r\r\n0\r\n\r\n",
    "chunks and trailers": b"Transfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n0\r\nX: x\r\n\r\n",
}
END = b"0\r\n\r\n"
offers = pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
bodies = pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)


def post(head: bytes, body: bytes, path: bytes = b"/", version: bytes = b"1.1") -> bytes:
    return b"POST %s HTTP/%s\r\nHost: x\r\n" % (path, version) + head + body


@offers
@bodies
@pytest.mark.parametrize("step", [1, 10**6])
async def test_the_body_arrives_however_it_is_split(offer: bytes, body: bytes, step: int) -> None:
    """And so does the next request of the connection."""
    closes = b"close" in offer

    async with serving() as server:
        reader, writer = await server.open()
        sent = post(offer, body) + (b"" if closes else post(b"", body, b"/next"))
        for at in range(0, len(sent), step):
            writer.write(sent[at : at + step])
            await asyncio.sleep(0)
        async with asyncio.timeout(PLENTY_S):
            answer = await reader.readuntil(END)
            if b"100 Continue" in answer:
                assert b"expect" in offer.lower()
            assert b"HTTP/1.1 200 OK" in answer
            assert b"101" not in answer
            if not closes:
                assert b"HTTP/1.1 200 OK" in await reader.readuntil(END)
        writer.close()
        assert server.app.bodies == ([5] if closes else [5, 5])


async def test_many_offers_one_behind_the_other() -> None:
    async with serving(header_timeout_s=10, body_timeout_s=10) as server:
        reader, writer = await server.open()
        writer.write((post(H2C, BODIES["a length"]) + post(H2C, BODIES["chunks"])) * 50)
        async with asyncio.timeout(PLENTY_S):
            for _ in range(100):
                assert b"200 OK" in await reader.readuntil(END)
        writer.close()
        assert server.app.bodies == [5] * 100


async def test_the_application_sees_the_whole_head() -> None:
    async with serving() as server:
        reader, writer = await server.open()
        writer.write(post(H2C + b"x-twice: a\r\nx-twice: b\r\nempty:\r\n", BODIES["a length"]))
        await reader.readuntil(END)
        writer.close()
        [scope] = server.app.scopes
        assert scope["method"] == "POST"
        headers = list(scope["headers"])
        assert (b"upgrade", b"h2c") in headers
        assert [value for name, value in headers if name == b"x-twice"] == [b"a", b"b"]
        assert (b"empty", b"") in headers
        assert len(headers) == 8


async def test_http_1_0_may_offer_too() -> None:
    async with serving() as server:
        answer = await server.say(post(H2C, BODIES["a length"], version=b"1.0"))
        assert answer.endswith(b"ok")
        assert server.app.bodies == [5]


async def test_what_follows_a_head_without_a_body_is_the_next_request() -> None:
    """Not a body, and not the offered protocol either."""
    async with serving() as server:
        get = b"GET %s HTTP/1.1\r\nHost: x\r\n"
        answer = await server.say(
            get % b"/" + H2C + b"\r\n" + get % b"/second" + b"Connection: close\r\n\r\n"
        )
        assert answer.count(b"200 OK") == 2
        assert [scope["path"] for scope in server.app.scopes] == ["/", "/second"]


@pytest.mark.parametrize(
    "rest",
    [
        b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"Content-Length: -1\r\n\r\n",
        b"Content-Length : 3\r\n\r\nabc",
        b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: gzip\r\n\r\nabc",
        b"folded: a\r\n b\r\n\r\n",
    ],
)
async def test_an_offer_admits_no_other_reading_of_a_body(rest: bytes) -> None:
    """What is refused without an offer is refused with one."""
    async with serving() as server:
        answer = await server.say(post(H2C, rest))
        plain = await server.say(post(b"", rest))
        assert b"HTTP/1.1 400" in answer
        assert answer == plain


@pytest.mark.parametrize("more", [b"a: b\r\n" * 101, b"long: " + b"x" * 33_000 + b"\r\n"])
async def test_the_bounds_of_the_head_hold(more: bytes) -> None:
    async with serving() as server:
        refusal(await server.say(post(H2C + more, BODIES["a length"])), 431)
        assert not server.app.scopes


async def test_a_slow_body_behind_an_offer_ends() -> None:
    async with serving(body_timeout_s=SHORT_S) as server:
        _, writer = await server.open()
        writer.write(post(H2C, b"Content-Length: 1000\r\n\r\nx", b"/slow"))
        async with asyncio.timeout(PLENTY_S):
            await server.app.left.wait()
        writer.close()
