"""Token buckets and leases, the same for the limiter in memory and the one in Redis.

The Redis half runs against a real redis-server of its own.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from app.admission.limiter import Limiter, MemoryLimiter, QuotaRequest
from app.admission.redis_limiter import RedisLimiter
from app.admission.tenants import Tenant
from tests.clock import Clock

MANY = 200


@pytest.fixture(params=["memory", "redis"])
def limiter(request: pytest.FixtureRequest) -> Callable[[], Limiter]:
    if request.param == "memory":
        return MemoryLimiter
    url = request.getfixturevalue("redis_url")
    return lambda: RedisLimiter(url, timeout_s=60)


def tenant(request: pytest.FixtureRequest, **limits: int) -> Tenant:
    """One per test: Redis outlives a test."""
    return Tenant.model_validate({"name": f"t{zlib.crc32(request.node.nodeid.encode())}", **limits})


@asynccontextmanager
async def opened(make: Callable[[], Limiter]) -> AsyncIterator[Limiter]:
    limiter = make()
    try:
        yield limiter
    finally:
        await limiter.close()


@pytest.mark.parametrize("limit", [1, 7])
@pytest.mark.parametrize(
    ("field", "quota"),
    [
        ("requests_per_minute", QuotaRequest(requests=1)),
        ("tokens_per_minute", QuotaRequest(tokens=1)),
        ("max_concurrent", QuotaRequest(concurrent=True)),
    ],
)
async def test_exactly_as_many_as_the_limit_get_in(
    request: pytest.FixtureRequest,
    limiter: Callable[[], Limiter],
    field: str,
    quota: QuotaRequest,
    limit: int,
) -> None:
    """Two hundred at once, from two gateways: a check apart from its taking lets more in.
    A minute's limit refills by a whole unit only after 60/limit s."""
    payer = tenant(request, **{field: limit})
    started = time.monotonic()
    async with opened(limiter) as one, opened(limiter) as two:
        gateways = [one, two] if isinstance(one, RedisLimiter) else [one, one]

        async def attempt(i: int) -> bool:
            mine = replace(quota, lease=f"lease{i}")
            return (await gateways[i % 2].acquire(payer, mine)).limited is None

        let_in = sum(await asyncio.gather(*(attempt(i) for i in range(MANY))))
    refilled = 0 if field == "max_concurrent" else int((time.monotonic() - started) * limit / 60)
    assert limit <= let_in <= limit + refilled


async def test_all_or_nothing(
    request: pytest.FixtureRequest, limiter: Callable[[], Limiter]
) -> None:
    """A refusal for one reason must not use up the others."""
    payer = tenant(request, requests_per_minute=2, tokens_per_minute=10, max_concurrent=1)
    async with opened(limiter) as one:
        first = await one.acquire(
            payer, QuotaRequest(requests=1, tokens=4, concurrent=True, lease="a")
        )
        assert first.limited is None
        assert first.requests is not None and first.requests.remaining == 1
        assert first.tokens is not None and first.tokens.remaining == 6
        second = await one.acquire(
            payer, QuotaRequest(requests=1, tokens=1, concurrent=True, lease="b")
        )
        assert second.limited == "concurrent"
        third = await one.acquire(payer, QuotaRequest(requests=1, tokens=9))
        assert third.limited == "tokens"
        assert third.requests is not None and third.requests.remaining == 1
        await one.release(payer, lease="a")
        last = await one.acquire(payer, QuotaRequest(requests=1, concurrent=True, lease="c"))
        assert last.limited is None


async def test_settling(request: pytest.FixtureRequest, limiter: Callable[[], Limiter]) -> None:
    """Back what was not used, never above a full bucket; more used than taken is owed."""
    payer, seen = tenant(request, tokens_per_minute=10), []
    async with opened(limiter) as one:
        for lease, taken, used in (("a", 6, 1), ("b", 0, 0), ("c", 9, 13), ("d", 0, 0)):
            decision = await one.acquire(payer, QuotaRequest(tokens=taken, lease=lease))
            assert decision.limited is None or taken == 0
            assert decision.tokens is not None
            seen.append(decision.tokens.remaining)
            await one.release(payer, lease, used=used)
        assert seen == [4, 9, 0, 0]  # one more comes after 6 s
        owed = await one.acquire(payer, QuotaRequest(tokens=1))
        assert owed.limited == "tokens"
        assert 18 < owed.retry_after_s <= 30


async def test_never_is_told(
    request: pytest.FixtureRequest, limiter: Callable[[], Limiter]
) -> None:
    payer = tenant(request, tokens_per_minute=100)
    async with opened(limiter) as one:
        decision = await one.acquire(payer, QuotaRequest(tokens=101))
        assert (decision.limited, decision.never) == ("tokens", True)
        assert (await one.acquire(payer, QuotaRequest(tokens=100))).limited is None


async def test_a_release_counts_once(
    request: pytest.FixtureRequest, limiter: Callable[[], Limiter]
) -> None:
    """A gateway that does not know whether it released a lease releases it again."""
    payer = tenant(request, tokens_per_minute=100, max_concurrent=1)
    async with opened(limiter) as one:
        await one.release(payer, "a", used=90)
        await one.acquire(payer, QuotaRequest(tokens=50, concurrent=True, lease="a"))
        await one.acquire(payer, QuotaRequest(tokens=40, lease="b"))
        for _ in range(3):
            await one.release(payer, "a", used=10)
        decision = await one.acquire(payer, QuotaRequest(concurrent=True, lease="c"))
        assert decision.limited is None
        assert decision.tokens is not None
        assert 50 <= decision.tokens.remaining <= 52


async def admitted(limiter: Limiter, payer: Tenant, requests: int) -> int:
    """How many of so many requests are, one after the other."""
    one = QuotaRequest(requests=1)
    decisions = [await limiter.acquire(payer, one) for _ in range(requests)]
    return sum(decision.limited is None for decision in decisions)


async def test_buckets_fill_steadily() -> None:
    clock = Clock()
    limiter = MemoryLimiter(clock)
    payer = Tenant(name="a", requests_per_minute=60)
    for wait_s, fill in ((0.0, 60), (0.5, 0), (0.5, 1), (3.0, 3), (600.0, 60)):
        clock.now += wait_s
        assert await admitted(limiter, payer, 100) == fill


async def test_a_lowered_limit_holds_at_once() -> None:
    limiter = MemoryLimiter(Clock())
    assert await admitted(limiter, Tenant(name="a", requests_per_minute=60), 1) == 1
    assert await admitted(limiter, Tenant(name="a", requests_per_minute=2), 9) == 2


async def test_without_redis_a_gateway_counts_by_itself() -> None:
    """Nobody listens on the port; the limit still holds, and Redis is not asked each time."""
    payer = Tenant(name="a", requests_per_minute=3)
    async with opened(lambda: RedisLimiter("redis://127.0.0.1:1/0", 0.2)) as one:
        assert await admitted(one, payer, 5) == 3
