"""A limiter for several gateways, with the token buckets in one Redis.

Each decision is one Lua script, which Redis runs as a whole: gateways cannot race each other.
Time is Redis's own, so the gateways' clocks do not matter. While Redis does not answer, a gateway
counts by itself: a limit is then per gateway, and no request is rejected for it. What it counted in
Redis is released there once Redis answers again.

What a request took is kept in Redis under its lease. So a gateway that does not know whether Redis
ran a script (the answer was lost, the request was cancelled) may release the lease all the same.
A place lasts only while its gateway renews it: those of a gateway that died end within LEASE_S.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from app.admission.limiter import (
    CONCURRENT_RETRY_S,
    BucketStatus,
    Kind,
    MemoryLimiter,
    QuotaRequest,
    RateLimitDecision,
    bucket_status,
)
from app.admission.tenants import Tenant
from app.observability import metrics

if TYPE_CHECKING:
    from redis.commands.core import AsyncScript

logger = logging.getLogger(__name__)

T = TypeVar("T")
# More would share this process's time: all of them answer within a timeout on a busy machine, too.
CONNECTIONS = 16
# After a failure Redis is not called for this long: requests must not queue up behind it.
CIRCUIT_OPEN_S = 1.0
# A place among concurrent requests ends after this long without a renewal, which come more often.
LEASE_S, RENEWAL_S = 30.0, 10.0
# Seconds after which Redis forgets what a request took, if no gateway has released it.
CHARGE_S = 86_400
# Leases of ended requests that Redis has not heard of, of all tenants: about 1 MB.
MAX_UNRELEASED = 10_000
LEASES_PER_CALL = 1000  # about 1 ms of Redis's time

# Levels are kept as text: Lua numbers would lose their fractions on the way out.
_BUCKET_FUNCTIONS = """
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6
local function filled(name, limit)
  if limit <= 0 then return nil end
  local level = tonumber(redis.call('HGET', KEYS[1], name) or limit)
  local at = tonumber(redis.call('HGET', KEYS[1], name .. '_at') or now)
  return math.min(limit, level + math.max(0, now - at) * limit / 60)
end
local function keep(name, limit, level)
  if level == nil then return end
  redis.call('HSET', KEYS[1], name, string.format('%.6f', level),
             name .. '_at', string.format('%.6f', now))
  local until_full = math.ceil((limit - level) * 60 / limit)
  if redis.call('TTL', KEYS[1]) < until_full + 60 then
    redis.call('EXPIRE', KEYS[1], until_full + 60)
  end
end
"""

# KEYS: buckets, places, the tokens that the lease took (0 if only a request). A call that was sent
# again takes nothing again.
_ACQUIRE_SCRIPT = (
    _BUCKET_FUNCTIONS
    + """
local limits = {requests = tonumber(ARGV[1]), tokens = tonumber(ARGV[3])}
local amounts = {requests = tonumber(ARGV[2]), tokens = tonumber(ARGV[4])}
local most, lease, lease_s = tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7])
local limited, wait, never, levels = '', 0, 0, {}
if most > 0 then
  if redis.call('ZSCORE', KEYS[2], lease) then
    most = 0
  elseif redis.call('ZCOUNT', KEYS[2], string.format('(%.6f', now), '+inf') >= most then
    limited, wait = 'concurrent', tonumber(ARGV[8])
  end
end
local charged = redis.call('GET', KEYS[3])
if charged then amounts.requests = 0 end
charged = tonumber(charged or 0)
amounts.tokens = math.max(0, amounts.tokens - charged)
for _, name in ipairs({'requests', 'tokens'}) do
  local limit, amount = limits[name], amounts[name]
  local level = filled(name, limit)
  levels[name] = level
  if level ~= nil and amount > level then
    limited = name
    if amount > limit then never = 1 end
    wait = math.max(wait, (amount - level) * 60 / limit)
  end
end
if limited == '' then
  for _, name in ipairs({'requests', 'tokens'}) do
    if levels[name] ~= nil then
      levels[name] = levels[name] - amounts[name]
      keep(name, limits[name], levels[name])
    end
  end
  if amounts.requests > 0 or amounts.tokens > 0 then
    local tokens = levels.tokens ~= nil and amounts.tokens or 0
    redis.call('SET', KEYS[3], charged + tokens, 'EX', ARGV[9])
  end
  if most > 0 then
    redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
    redis.call('ZADD', KEYS[2], now + lease_s, lease)
    redis.call('EXPIRE', KEYS[2], math.ceil(lease_s))
  end
end
local function text(level) return level and string.format('%.6f', level) or '' end
return {limited, tostring(wait), never, text(levels.requests), text(levels.tokens)}
"""
)

# KEYS: buckets, places, the tokens that each lease took. ARGV: the limit, then of each lease its
# name and what it used.
_RELEASE_SCRIPT = (
    _BUCKET_FUNCTIONS
    + """
local limit, unused = tonumber(ARGV[1]), 0
for i = 3, #KEYS do
  redis.call('ZREM', KEYS[2], ARGV[2 * i - 4])
  local charged = redis.call('GET', KEYS[i])
  if charged then
    redis.call('DEL', KEYS[i])
    unused = unused + tonumber(charged) - tonumber(ARGV[2 * i - 3])
  end
end
local level = filled('tokens', limit)
if level ~= nil and unused ~= 0 then keep('tokens', limit, math.min(limit, level + unused)) end
return 0
"""
)

# Not those that Redis does not have (any more): their requests may have ended meanwhile.
_RENEW_SCRIPT = """
local clock = redis.call('TIME')
local ends = tonumber(clock[1]) + tonumber(clock[2]) / 1e6 + tonumber(ARGV[1])
for i = 2, #ARGV do redis.call('ZADD', KEYS[1], 'XX', ends, ARGV[i]) end
redis.call('EXPIRE', KEYS[1], math.ceil(tonumber(ARGV[1])))
return 0
"""


@dataclass
class _Unreleased:
    """A tenant's leases whose end Redis has not heard of, each with the tokens that it used."""

    tenant: Tenant
    leases: dict[str, int] = field(default_factory=dict)


class RedisLimiter:
    """Limits counted in Redis, and in this process while Redis does not answer.

    A release that fails is sent again.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            # One retry, for a connection that Redis closed while it was idle.
            retry=Retry(NoBackoff(), 1),
            decode_responses=True,
        )
        self._redis = Redis.from_pool(pool)
        self._connections = asyncio.Semaphore(CONNECTIONS)
        self._acquire_script = self._redis.register_script(_ACQUIRE_SCRIPT)
        self._release_script = self._redis.register_script(_RELEASE_SCRIPT)
        self._renew_script = self._redis.register_script(_RENEW_SCRIPT)
        self._timeout_s = timeout_s
        self._fallback = MemoryLimiter()
        self._clock = clock
        self._circuit_open_until = 0.0
        self._failing = False  # since the last answer
        self._held: dict[str, set[str]] = {}  # leases that Redis gave, by tenant
        self._renewed_at = clock()
        self._unreleased: dict[str, _Unreleased] = {}
        self._returning = asyncio.Lock()

    async def acquire(self, tenant: Tenant, quota: QuotaRequest) -> RateLimitDecision:
        """Check and take, as `Limiter.acquire` says."""
        if _unlimited(tenant):
            return RateLimitDecision()
        arguments: list[str | int | float] = [
            *(tenant.requests_per_minute or 0, quota.requests),
            *(tenant.tokens_per_minute or 0, quota.tokens),
            *((tenant.max_concurrent or 0) if quota.concurrent else 0, quota.lease),
            *(LEASE_S, CONCURRENT_RETRY_S, CHARGE_S),
        ]
        answer = None
        if not self._circuit_open:
            keys = _keys(tenant.name, quota.lease)
            try:
                answer = await self._call(
                    lambda: self._run(self._acquire_script, tenant, keys, arguments)
                )
            finally:
                # Redis may have run the script all the same. A lease that it gave before is
                # released by its request.
                if answer is None and quota.lease not in self._held.get(tenant.name, ()):
                    self._keep(tenant, quota.lease, 0)
        if answer is None:
            metrics.LIMITER_FALLBACKS.inc()
            decision = await self._fallback.acquire(tenant, quota)
            return replace(decision, limiter=self._fallback)
        limited, wait, never, requests, tokens = answer
        if quota.lease and not limited:
            self._held.setdefault(tenant.name, set()).add(quota.lease)
        return RateLimitDecision(
            _kind(limited),
            float(wait),
            bool(int(never)),
            _bucket_status(tenant.requests_per_minute, requests),
            _bucket_status(tenant.tokens_per_minute, tokens),
        )

    async def release(self, tenant: Tenant, lease: str, *, used: int = 0) -> None:
        """End a lease, as `Limiter.release` says; later, if Redis fails."""
        if (held := self._held.get(tenant.name)) is not None:
            held.discard(lease)
            if not held:
                del self._held[tenant.name]
        if _unlimited(tenant):
            return
        answer = None
        try:
            if not self._circuit_open:
                keys = _keys(tenant.name, lease)
                arguments = [tenant.tokens_per_minute or 0, lease, used]
                answer = await self._call(
                    lambda: self._run(self._release_script, tenant, keys, arguments)
                )
        finally:  # also if the request's task is cancelled meanwhile
            if answer is None:
                self._keep(tenant, lease, used)

    async def keep_leases(self) -> None:
        """Renew the leases of running requests, and release what Redis has not heard of, until
        cancelled, also while no request comes."""
        while True:
            await asyncio.sleep(CIRCUIT_OPEN_S)
            if not self._circuit_open:
                await self._return_all()
            if not self._circuit_open and self._clock() - self._renewed_at >= RENEWAL_S:
                await self._renew_all()

    async def close(self) -> None:
        """Release what Redis has not heard of, and close the connections to it."""
        self._circuit_open_until = 0.0  # a last attempt
        await self._return_all()
        await self._redis.aclose()

    @property
    def _circuit_open(self) -> bool:
        """Whether Redis failed a moment ago, and is not called."""
        return self._clock() < self._circuit_open_until

    def _keep(self, tenant: Tenant, lease: str, used: int) -> None:
        """Keep a release until Redis answers. One too many is dropped: its place ends by itself."""
        if not lease:
            return
        if sum(len(each.leases) for each in self._unreleased.values()) < MAX_UNRELEASED:
            kept = self._unreleased.setdefault(tenant.name, _Unreleased(tenant))
            kept.tenant = tenant
            kept.leases[lease] = used

    async def _renew_all(self) -> None:
        """Renew the leases of running requests, until Redis fails."""
        for name in list(self._held):
            leases = list(self._held.get(name, ()))
            for i in range(0, len(leases), LEASES_PER_CALL):
                arguments: list[str | float] = [LEASE_S, *leases[i : i + LEASES_PER_CALL]]
                renew = partial(self._renew_script, keys=_keys(name)[1:], args=arguments)
                if await self._call(renew) is None:
                    return
        self._renewed_at = self._clock()

    async def _return_all(self) -> None:
        """Release what was kept of all tenants, until Redis fails."""
        for name in list(self._unreleased):
            while name in self._unreleased:
                if await self._call(partial(self._return_kept, name)) is None:
                    return

    async def _return_kept(self, name: str) -> bool:
        """Release some of what was kept of one tenant. Raises RedisError, and keeps it."""
        async with self._returning:
            if (kept := self._unreleased.get(name)) is None:
                return True
            leases = dict(islice(kept.leases.items(), LEASES_PER_CALL))
            arguments: list[str | int] = [kept.tenant.tokens_per_minute or 0]
            for lease, used in leases.items():
                arguments += (lease, used)
            await self._release_script(keys=_keys(name, *leases), args=arguments)
            for lease in leases:  # more may have come meanwhile
                del kept.leases[lease]
            if not kept.leases:
                del self._unreleased[name]
        return True

    async def _run(
        self, script: AsyncScript, tenant: Tenant, keys: Sequence[str], arguments: Sequence[Any]
    ) -> Any:
        """Run a script for a tenant. What was kept of the tenant is released first."""
        if tenant.name in self._unreleased:
            await self._return_kept(tenant.name)
        return await script(keys=keys, args=arguments)

    async def _call(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """The result of work with Redis, None if Redis fails or does not answer in time.

        Waiting for a connection is no failure of Redis: a burst of one tenant must not end what
        gateways share.
        """
        async with self._connections:
            if self._circuit_open:  # since the call began to wait
                return None
            try:
                async with asyncio.timeout(self._timeout_s):
                    result = await work()
            except (RedisError, OSError, TimeoutError) as error:
                if not self._circuit_open:
                    self._circuit_open_until = self._clock() + CIRCUIT_OPEN_S
                    await self._count_alone(error)
                return None
            if self._failing and not self._circuit_open:  # else it was called before the failure
                self._failing = False
                logger.warning("Redis answers again, and limits are counted there")
            return result

    async def _count_alone(self, error: Exception) -> None:
        """Say that Redis fails, once until it answers again, and close the idle connections: they
        may lead to a server that is no master any more, or is gone."""
        if not self._failing:
            self._failing = True
            logger.warning("Redis does not answer, this gateway counts limits by itself: %r", error)
        with suppress(RedisError, OSError, TimeoutError):
            await self._redis.connection_pool.disconnect(inuse_connections=False)


def _keys(name: str, *leases: str) -> list[str]:
    """A tenant's keys in Redis: buckets, places of concurrent requests, what each lease took. The
    braces keep all on one node of a cluster."""
    kinds = ("buckets", "leases", *(f"charge:{lease}" for lease in leases))
    return [f"aerie:{{{name}}}:{kind}" for kind in kinds]


def _unlimited(tenant: Tenant) -> bool:
    return (
        tenant.requests_per_minute is None
        and tenant.tokens_per_minute is None
        and tenant.max_concurrent is None
    )


def _kind(name: str) -> Kind | None:
    kinds: dict[str, Kind] = {k: k for k in ("requests", "tokens", "concurrent")}
    return kinds.get(name)


def _bucket_status(limit: int | None, level: str) -> BucketStatus | None:
    return bucket_status(limit, float(level)) if level else None
