"""Event streams: errors before headers, keep-alive, and nothing left running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from app.errors import ApiError
from app.http.streaming import BUFFERED_EVENTS, KEEP_ALIVE, EventStream
from app.llm.first_token import FirstToken, settle_first_token, watch_first_token
from tests.waiting import IN_TIME_S

QUIET_S = 600.0  # no comment is due while a test runs


async def collect(stream: EventStream) -> list[str]:
    return [event async for event in stream.body()]


async def tokens(*names: str) -> AsyncGenerator[str, None]:
    for name in names:
        yield name


def test_events_before_and_after_the_first_token_arrive_in_order() -> None:
    async def scenario() -> list[str]:
        first = watch_first_token()

        async def events() -> AsyncGenerator[str, None]:
            yield "created"
            async for token in settle_first_token(tokens("a", "b")):
                yield token

        stream = EventStream(events(), keep_alive_s=QUIET_S)
        assert await stream.begin(first) is None
        assert first.settled
        return await collect(stream)

    assert asyncio.run(scenario()) == ["created", "a", "b"]


def test_an_error_before_the_first_token_is_handed_over() -> None:
    """The serving class turns it into an event; the status must still be an error's."""

    async def scenario() -> BaseException | None:
        first = watch_first_token()

        async def failing() -> AsyncGenerator[str, None]:
            raise ValueError("bad grammar")
            yield ""

        async def events() -> AsyncGenerator[str, None]:
            try:
                async for token in settle_first_token(failing()):
                    yield token
            except ValueError:
                yield "data: {error}"

        stream = EventStream(events(), keep_alive_s=QUIET_S)
        error = await stream.begin(first)
        await stream.close()
        return error

    assert isinstance(asyncio.run(scenario()), ValueError)


def test_an_error_after_the_first_token_is_not_taken_back() -> None:
    async def scenario() -> FirstToken:
        first = watch_first_token()

        async def breaking() -> AsyncGenerator[str, None]:
            yield "a"
            raise ValueError

        async def events() -> AsyncGenerator[str, None]:
            async for token in settle_first_token(breaking()):
                yield token

        stream = EventStream(events(), keep_alive_s=QUIET_S)
        assert await stream.begin(first) is None
        with pytest.raises(ValueError):  # noqa: PT011
            await collect(stream)
        return first

    assert asyncio.run(scenario()).error is None


def test_silence_sends_comments_and_loses_no_event() -> None:
    async def scenario() -> list[str]:
        async def events() -> AsyncGenerator[str, None]:
            yield "a"
            await heard.wait()
            yield "b"

        heard, got = asyncio.Event(), list[str]()
        stream = EventStream(events(), keep_alive_s=0.01)
        await stream.begin(FirstToken(settled=True))
        async for event in stream.body():
            got.append(event)
            if got.count(KEEP_ALIVE) == 2:
                heard.set()
        return got

    got = asyncio.run(asyncio.wait_for(scenario(), IN_TIME_S))
    assert [event for event in got if event != KEEP_ALIVE] == ["a", "b"]


def test_waiting_for_the_first_token_ends_at_the_keep_alive_time() -> None:
    async def scenario() -> list[str]:
        async def events() -> AsyncGenerator[str, None]:
            await begun.wait()
            yield "late"

        begun = asyncio.Event()
        stream = EventStream(events(), keep_alive_s=0.01)
        assert await stream.begin(FirstToken()) is None
        begun.set()
        return await collect(stream)

    assert asyncio.run(asyncio.wait_for(scenario(), IN_TIME_S))[-1] == "late"


@pytest.mark.parametrize("consumed", [0, 1])
def test_closing_ends_the_generation_started_or_not(consumed: int) -> None:
    async def scenario() -> bool:
        ended = False

        async def events() -> AsyncGenerator[str, None]:
            nonlocal ended
            try:
                while True:
                    yield "x"
                    await asyncio.sleep(0)
            finally:
                ended = True

        stream = EventStream(events(), keep_alive_s=QUIET_S)
        body = stream.body()
        await asyncio.sleep(0.01)
        for _ in range(consumed):
            await anext(body)
        await stream.close()
        return ended

    assert asyncio.run(scenario())


def test_a_slow_reader_holds_the_generation_back() -> None:
    async def scenario() -> int:
        produced = 0

        async def events() -> AsyncGenerator[str, None]:
            nonlocal produced
            while True:
                produced += 1
                yield "x"

        stream = EventStream(events(), keep_alive_s=QUIET_S)
        await asyncio.sleep(0.05)
        await stream.close()
        return produced

    assert asyncio.run(scenario()) < 100


@pytest.mark.parametrize("read_before", [0, 1, 10])
@pytest.mark.parametrize("generated", [0, 1, BUFFERED_EVENTS - 1, BUFFERED_EVENTS, 1000])
def test_a_deadline_leaves_no_hole_in_what_is_read(read_before: int, generated: int) -> None:
    """However far the reader is behind, it gets the first events, all of them, and the error."""

    async def scenario() -> tuple[list[str], list[str]]:
        async def events() -> AsyncGenerator[str, None]:
            for number in range(generated):
                yield str(number)
            await asyncio.Event().wait()

        stream = EventStream(events(), keep_alive_s=QUIET_S)
        expired: asyncio.Future[ApiError] = asyncio.get_running_loop().create_future()
        stream.cut_at(expired, lambda error, number: f"{error.message} after {number}")
        body = stream.body()
        before = [await anext(body) for _ in range(min(read_before, generated))]
        await asyncio.sleep(0.01)  # the buffer fills
        expired.set_result(ApiError(504, "late"))
        await asyncio.sleep(0.01)
        after = [event async for event in body]
        await stream.close()
        return before, after

    before, after = asyncio.run(asyncio.wait_for(scenario(), IN_TIME_S))
    *read, last = [*before, *after]
    assert read == [str(number) for number in range(len(read))]
    assert len(read) >= min(generated, BUFFERED_EVENTS)
    assert last == f"late after {len(read)}"


def test_a_deadline_wakes_a_reader_that_waits() -> None:
    async def scenario() -> list[str]:
        async def events() -> AsyncGenerator[str, None]:
            yield "0"
            await asyncio.Event().wait()

        stream = EventStream(events(), keep_alive_s=QUIET_S)
        expired: asyncio.Future[ApiError] = asyncio.get_running_loop().create_future()
        stream.cut_at(expired, lambda error, number: f"{error.message} after {number}")
        asyncio.get_running_loop().call_later(0.05, expired.set_result, ApiError(504, "late"))
        return await asyncio.wait_for(collect(stream), IN_TIME_S)

    assert asyncio.run(scenario()) == ["0", "late after 1"]
