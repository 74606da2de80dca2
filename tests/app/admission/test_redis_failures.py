"""Quotas in a Redis that fails for a moment: nothing stays taken, nothing is returned elsewhere.

A real redis-server, behind a connection that the tests cut.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from redis.asyncio import Redis

from app.admission import redis_limiter
from app.admission.controller import AdmissionController
from app.admission.estimate import Estimate
from app.admission.limiter import Limiter, MemoryLimiter, QuotaRequest, RateLimitDecision
from app.admission.redis_limiter import RedisLimiter
from app.admission.tenants import Identity, Tenant
from app.errors import ApiError
from app.http.request_context import RequestContext
from app.llm.engine_load import EngineLoad
from app.settings import load
from tests.app.admission.conftest import redis_server
from tests.clock import Clock
from tests.waiting import IN_TIME_S, soon

PATIENT_S = 60.0  # no timeout but where an answer never comes
UNHEARD_S = 0.3
WAYS = ("refused", "unheard")


class Line:
    """The connection to Redis: `up`, `refused`, or `unheard`, which loses Redis's answers.

    Each answer takes `delay_s`.
    """

    def __init__(self, redis_url: str) -> None:
        self.state, self.delay_s = "up", 0.0
        self.unheard = 0  # answers that were lost
        self.redis = urlsplit(redis_url)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: list[asyncio.StreamWriter] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        try:
            yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            for end in self._ends:
                end.close()
            waits = [end.wait_closed() for end in self._ends]
            await asyncio.gather(*self._tasks, *waits, return_exceptions=True)

    async def _connected(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        assert self.redis.port is not None
        self._ends.append(back)
        answers, redis = await asyncio.open_connection("127.0.0.1", self.redis.port)
        self._ends.append(redis)
        for source, sink in ((client, redis), (answers, back)):
            task = asyncio.create_task(self._pass_on(source, sink, source is answers))
            self._tasks.add(task)

    async def _pass_on(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, answers: bool
    ) -> None:
        with suppress(OSError):
            while data := await source.read(65536):
                if self.state == "refused":
                    break
                if answers:
                    await asyncio.sleep(self.delay_s)
                if answers and self.state == "unheard":
                    self.unheard += 1
                else:
                    sink.write(data)
        sink.close()


class Gateways:
    """A gateway behind the line, and another that always reaches Redis."""

    def __init__(self, line: Line, through_line: str, redis_url: str) -> None:
        self.line, self.clock = line, Clock()
        self.cut_off = RedisLimiter(through_line, PATIENT_S, clock=self.clock)
        self.other = RedisLimiter(redis_url, PATIENT_S)

    def fail(self, way: str) -> None:
        """Redis is not reached any more."""
        self.line.state = way
        if way == "unheard":
            self.cut_off._timeout_s = UNHEARD_S

    def back(self) -> None:
        """Redis answers again, and the gateway asks it again."""
        self.line.state = "up"
        self.cut_off._timeout_s = PATIENT_S
        self.clock.now += redis_limiter.CIRCUIT_OPEN_S


@asynccontextmanager
async def connected(redis_url: str) -> AsyncIterator[Gateways]:
    line = Line(redis_url)
    async with line.open() as through_line:
        gateways = Gateways(line, through_line, redis_url)
        warm = Tenant(name="warm", max_concurrent=1)  # a connection, and both scripts
        await gateways.cut_off.acquire(warm, QuotaRequest())
        await gateways.cut_off.release(warm, "none")
        yield gateways
        await gateways.other.close()
        await gateways.cut_off.close()


@pytest.fixture
def tenant(request: pytest.FixtureRequest) -> Tenant:
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)[-60:]
    return Tenant(name=name, tokens_per_minute=600, max_concurrent=1)


def lease(name: str) -> QuotaRequest:
    return QuotaRequest(concurrent=True, lease=name)


async def tokens_left(limiter: Limiter, tenant: Tenant) -> int:
    decision = await limiter.acquire(tenant, QuotaRequest())
    assert decision.tokens is not None
    return decision.tokens.remaining


async def admitted(limiter: Limiter, tenant: Tenant, name: str) -> bool:
    return (await limiter.acquire(tenant, lease(name))).limited is None


async def until_admitted(limiter: Limiter, tenant: Tenant, name: str) -> None:
    async with asyncio.timeout(IN_TIME_S):
        while not await admitted(limiter, tenant, name):  # noqa: ASYNC110 - Redis has no event
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("open_before", [False, True])
async def test_a_request_that_ends_without_redis_is_released_once_it_is_back(
    redis_url: str, tenant: Tenant, way: str, open_before: bool
) -> None:
    """Before the next request of its tenant is counted; Redis may have failed before, too."""
    async with connected(redis_url) as gateways:
        limiter = gateways.cut_off
        assert await admitted(limiter, tenant, "a")
        assert (await limiter.acquire(tenant, QuotaRequest(tokens=500, lease="a"))).limiter is None
        gateways.fail(way)
        if open_before:
            await limiter.acquire(tenant, QuotaRequest())
        await limiter.release(tenant, "a", used=50)
        if way == "refused":
            assert not await admitted(gateways.other, tenant, "b"), "nothing is tested"
        gateways.back()
        assert await admitted(limiter, tenant, "b")
        assert 550 <= await tokens_left(gateways.other, tenant) <= 600


async def test_an_outage_is_told_once_and_so_is_its_end(
    redis_url: str, tenant: Tenant, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: a warning each second while Redis is down, and none when it answers again."""

    def told() -> list[str]:
        return [
            record.message for record in caplog.records if record.name == redis_limiter.__name__
        ]

    async with connected(redis_url) as gateways:
        for outage in range(2):
            gateways.fail("refused")
            for _ in range(5):
                await gateways.cut_off.acquire(tenant, QuotaRequest())
                gateways.clock.now += redis_limiter.CIRCUIT_OPEN_S
            [message] = told()[2 * outage :]
            assert message.startswith("Redis does not answer")
            gateways.back()
            for _ in range(2):
                await gateways.cut_off.acquire(tenant, QuotaRequest())
            assert told()[2 * outage + 1 :] == ["Redis answers again, and limits are counted there"]


async def test_it_is_released_without_another_request(
    redis_url: str, tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another gateway's requests wait for the lease, too."""
    monkeypatch.setattr(redis_limiter, "CIRCUIT_OPEN_S", 0.05)

    async with connected(redis_url) as gateways:
        assert await admitted(gateways.cut_off, tenant, "a")
        gateways.fail("refused")
        returning = asyncio.create_task(gateways.cut_off.keep_leases())
        await gateways.cut_off.release(tenant, "a")
        assert not await admitted(gateways.other, tenant, "b")
        gateways.back()
        await until_admitted(gateways.other, tenant, "b")
        returning.cancel()


async def test_the_controller_runs_that_in_the_background() -> None:
    settings = load({"redis_url": "redis://127.0.0.1:1/0"}, {})
    admission = AdmissionController(settings, EngineLoad(capacity=8))
    (task,) = admission.background
    async with admission.open():
        await asyncio.sleep(0)
        assert (task.name, task.state) == ("redis_leases", "running")


async def test_a_gateway_that_ends_releases_what_it_kept(redis_url: str, tenant: Tenant) -> None:
    async with connected(redis_url) as gateways:
        assert await admitted(gateways.cut_off, tenant, "a")
        gateways.fail("refused")
        await gateways.cut_off.release(tenant, "a")
        gateways.line.state = "up"
        await gateways.cut_off.close()
        assert await admitted(gateways.other, tenant, "b")


async def test_a_release_whose_task_is_cancelled_is_made_up_for(
    redis_url: str, tenant: Tenant
) -> None:
    async with connected(redis_url) as gateways:
        assert await admitted(gateways.cut_off, tenant, "a")
        gateways.fail("refused")
        releasing = asyncio.create_task(gateways.cut_off.release(tenant, "a"))
        await asyncio.sleep(0)
        releasing.cancel()
        with suppress(asyncio.CancelledError):
            await releasing
        gateways.back()
        assert await admitted(gateways.cut_off, tenant, "b")


async def test_a_lease_that_redis_gave_too_late_is_nobodys(redis_url: str, tenant: Tenant) -> None:
    """The gateway counts that request by itself."""
    async with connected(redis_url) as gateways:
        gateways.fail("unheard")
        decision = await gateways.cut_off.acquire(tenant, lease("a"))
        assert decision.limited is None
        assert decision.limiter is not None
        await soon(lambda: gateways.line.unheard)
        assert not await admitted(gateways.other, tenant, "b"), "Redis gave it"
        await decision.limiter.release(tenant, "a")
        gateways.back()
        assert await admitted(gateways.cut_off, tenant, "b")


async def test_what_is_kept_has_a_bound(
    redis_url: str, tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_limiter, "MAX_UNRELEASED", 2)
    several = tenant.model_copy(update={"max_concurrent": 3})

    async with connected(redis_url) as gateways:
        for name in "abc":
            assert await admitted(gateways.cut_off, several, name)
        gateways.fail("refused")
        for name in "abc":
            await gateways.cut_off.release(several, name)
        gateways.back()
        free = [await admitted(gateways.cut_off, several, name) for name in "def"]
        assert free == [True, True, False], "the third lease ends by itself"


async def test_a_refused_request_leaves_no_lease_to_release(
    redis_url: str, tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a refused client would fill what is kept, and leases of others would be lost."""
    monkeypatch.setattr(redis_limiter, "MAX_UNRELEASED", 2)
    often = Tenant(name="often", requests_per_minute=1)
    async with connected(redis_url) as gateways:
        admission = AdmissionController(load({}, {}), EngineLoad(capacity=8))
        admission.limiter = gateways.cut_off
        running = RequestContext(admission, Identity(tenant))
        await running.begin(60.0)
        gateways.fail("refused")
        await gateways.cut_off.acquire(often, QuotaRequest(requests=1))
        for _ in range(4):
            refused = RequestContext(admission, Identity(often))
            with pytest.raises(ApiError):
                await refused.begin(60.0)
            await refused.close()
        await running.close()
        gateways.back()
        assert await admitted(gateways.cut_off, tenant, "b"), "its lease was released"


async def serving(limiter: RedisLimiter, tenant: Tenant) -> RequestContext:
    """A request that has begun."""
    admission = AdmissionController(load({}, {}), EngineLoad(capacity=8))
    admission.limiter = limiter
    context = RequestContext(admission, Identity(tenant))
    await context.begin(60.0)
    return context


async def until_charged(limiter: Limiter, tenant: Tenant, left: int) -> None:
    async with asyncio.timeout(IN_TIME_S):
        while await tokens_left(limiter, tenant) > left:  # noqa: ASYNC110 - Redis has no event
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("cancelled", [True, False])
async def test_tokens_that_redis_took_without_an_answer_are_returned(
    redis_url: str, tenant: Tenant, cancelled: bool
) -> None:
    """The client left meanwhile; or it did not, and the gateway counted the request by itself."""
    async with connected(redis_url) as gateways:
        context = await serving(gateways.cut_off, tenant)
        gateways.fail("unheard")
        admitting = asyncio.create_task(context.admit("model", Estimate(tokens=500, sequences=1)))
        await until_charged(gateways.other, tenant, 300)
        if cancelled:
            admitting.cancel()
        with suppress(asyncio.CancelledError):
            await admitting
        assert not await admitted(gateways.other, tenant, "b"), "the request has not ended"
        await context.close()
        gateways.back()
        assert await admitted(gateways.cut_off, tenant, "b")
        assert await tokens_left(gateways.other, tenant) == 600


async def test_a_call_that_was_sent_again_takes_nothing_again(
    redis_url: str, tenant: Tenant
) -> None:
    async with connected(redis_url) as gateways:
        for _ in range(2):
            quota = QuotaRequest(tokens=500, concurrent=True, lease="a")
            assert (await gateways.other.acquire(tenant, quota)).limited is None
        await gateways.other.release(tenant, "a", used=50)
        assert 550 <= await tokens_left(gateways.other, tenant) <= 570


@pytest.mark.parametrize(
    ("limit", "limited"),
    [
        ("requests_per_minute", "requests"),
        ("tokens_per_minute", "tokens"),
        ("max_concurrent", "concurrent"),
    ],
)
async def test_a_call_that_was_sent_again_takes_nothing_again_of_any_limit(
    redis_url: str, limit: str, limited: str
) -> None:
    """The fault: without `max_concurrent` a request whose connection broke counted as two, and was
    refused where a minute has one. The request comes first, its tokens later."""
    tenant = Tenant.model_validate({"name": uuid.uuid4().hex, limit: 1})
    async with connected(redis_url) as gateways:
        for quota in (
            QuotaRequest(requests=1, concurrent=True, lease="a"),
            QuotaRequest(tokens=1, lease="a"),
        ):
            for _ in range(2):
                assert (await gateways.other.acquire(tenant, quota)).limited is None
        another = QuotaRequest(requests=1, tokens=1, concurrent=True, lease="b")
        assert (await gateways.other.acquire(tenant, another)).limited == limited
        await gateways.other.release(tenant, "a", used=0)
        keys = [key async for key in gateways.other._redis.scan_iter(f"*{tenant.name}*charge*")]
        assert keys == []


async def test_places_of_a_gateway_that_died_end_soon_and_those_of_others_do_not(
    redis_url: str, tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_limiter, "LEASE_S", 1.5)
    monkeypatch.setattr(redis_limiter, "RENEWAL_S", 0.2)
    monkeypatch.setattr(redis_limiter, "CIRCUIT_OPEN_S", 0.1)
    several = tenant.model_copy(update={"max_concurrent": 2})

    async with connected(redis_url) as gateways:
        living = asyncio.create_task(gateways.other.keep_leases())
        assert await admitted(gateways.other, several, "lives")
        assert await admitted(gateways.cut_off, several, "dies")
        assert not await admitted(gateways.other, several, "b")
        await until_admitted(gateways.other, several, "b")
        await asyncio.sleep(2 * redis_limiter.LEASE_S)
        assert not await admitted(gateways.other, several, "c")
        living.cancel()


TROUBLES = {
    "full": ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
    "slow": ("CLIENT PAUSE 1000 ALL", "PING"),
    "no replicas": ("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0"),
    "scripts forgotten": ("SCRIPT FLUSH", "PING"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
async def test_a_redis_in_trouble_rejects_nobody_and_keeps_nothing(
    redis_url: str, tenant: Tenant, trouble: str
) -> None:
    begin, end = TROUBLES[trouble]
    async with connected(redis_url) as gateways, Redis.from_url(redis_url) as operator:
        limiter, counted = gateways.cut_off, trouble == "scripts forgotten"
        limiter._timeout_s = UNHEARD_S if trouble == "slow" else PATIENT_S
        several = tenant.model_copy(update={"max_concurrent": 2})
        for name in ("before", "during"):
            assert await admitted(limiter, several, name)
        await limiter.acquire(several, QuotaRequest(tokens=500, lease="before"))
        await operator.execute_command(*begin.split())
        await limiter.release(several, "before", used=0)
        decision = await limiter.acquire(several, lease("new"))
        assert decision.limited is None
        assert (decision.limiter is None) == counted
        await limiter.release(several, "during")
        await operator.execute_command(*end.split())
        gateways.back()
        if counted:
            await limiter.release(several, "new")
        for name in "xy":
            decision = await limiter.acquire(several, lease(name))
            assert (decision.limited, decision.limiter) == (None, None), name
        assert await tokens_left(gateways.other, several) == 600


async def test_after_a_failover_the_new_master_counts(
    redis_url: str, tenant: Tenant, tmp_path: Path
) -> None:
    """The old one lives on as a replica, and keeps the connections that it has."""
    with redis_server(tmp_path) as new_url:
        async with connected(redis_url) as gateways, Redis.from_url(redis_url) as old:
            limiter, port = gateways.cut_off, urlsplit(new_url).port
            several = [limiter.acquire(tenant, QuotaRequest()) for _ in range(5)]
            await asyncio.gather(*several)  # as many connections
            await old.execute_command("REPLICAOF", "127.0.0.1", str(port))
            gateways.line.redis = urlsplit(new_url)
            try:
                assert (await limiter.acquire(tenant, lease("a"))).limiter is not None
                gateways.back()
                for name in ("a", "b"):
                    decision = await limiter.acquire(tenant, lease(name))
                    assert decision.limiter is None
                assert decision.limited == "concurrent"
            finally:
                await old.execute_command("REPLICAOF", "NO", "ONE")


async def test_a_burst_is_counted_in_redis(
    redis_url: str, tenant: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a tenant that gets its limits twice with many requests at once, as those that wait
    for a connection for long count as a Redis that does not answer."""
    monkeypatch.setattr(redis_limiter, "CONNECTIONS", 1)  # which is open: no handshake
    async with connected(redis_url) as gateways:
        gateways.cut_off._timeout_s = 1.5  # the twenty take 3 s
        gateways.line.delay_s = 0.15
        burst = [gateways.cut_off.acquire(tenant, lease(f"lease{i}")) for i in range(20)]
        decisions = await asyncio.gather(*burst)
        assert {decision.limiter for decision in decisions} == {None}
        assert sum(decision.limited is None for decision in decisions) == 1


async def test_cancelled_requests_use_up_no_connections(redis_url: str, tenant: Tenant) -> None:
    many = tenant.model_copy(update={"max_concurrent": 1000})
    async with connected(redis_url) as gateways:
        limiter = gateways.other
        for i in range(300):
            quota = QuotaRequest(tokens=1, concurrent=True, lease=f"lease{i}")
            acquiring = asyncio.create_task(limiter.acquire(many, quota))
            for _ in range(i % 12):
                await asyncio.sleep(0)
            acquiring.cancel()
            await asyncio.gather(acquiring, return_exceptions=True)
            await limiter.release(many, quota.lease)
        waiting = [limiter.acquire(many, QuotaRequest()) for _ in range(100)]
        decisions = await asyncio.gather(*waiting)
        assert {decision.limiter for decision in decisions} == {None}
        assert await tokens_left(limiter, many) == 600


class Switching(MemoryLimiter):
    """Counts by itself; what comes after `away` was set is counted by another limiter."""

    def __init__(self) -> None:
        super().__init__()
        self.away, self.another = False, MemoryLimiter()

    async def acquire(self, tenant: Tenant, quota: QuotaRequest) -> RateLimitDecision:
        if not self.away:
            return await super().acquire(tenant, quota)
        decision = await self.another.acquire(tenant, quota)
        return RateLimitDecision(decision.limited, tokens=decision.tokens, limiter=self.another)


@pytest.mark.parametrize("away_from", ["start", "tokens", "end", "never"])
async def test_a_request_is_released_where_it_was_counted(tenant: Tenant, away_from: str) -> None:
    admission = AdmissionController(load({}, {}), EngineLoad(capacity=8))
    admission.limiter = limiter = Switching()
    context = RequestContext(admission, Identity(tenant))
    limiter.away = away_from == "start"
    await context.begin(60.0)
    limiter.away = limiter.away or away_from == "tokens"
    await context.admit("model", Estimate(tokens=100, sequences=1))
    charged = limiter.another if away_from in ("start", "tokens") else limiter
    spared = limiter if charged is limiter.another else limiter.another
    assert await tokens_left(charged, tenant) < 600
    limiter.away = limiter.away or away_from == "end"
    await context.close()
    limiter.away = False
    for each in (charged, spared):
        assert await tokens_left(each, tenant) == 600
        assert await admitted(each, tenant, "b"), "the lease has ended"
