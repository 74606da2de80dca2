"""A limiter for several gateways, with the token buckets in one Redis.

Each decision is one Lua script, which Redis runs as a whole: gateways cannot race each other.
Time is Redis's own, so the gateways' clocks do not matter. While Redis does not answer, a gateway
counts by itself: a limit is then per gateway, and no request is rejected for it. What it counted in
Redis is released there once Redis answers again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from app.admission.limiter import (
    CONCURRENT_RETRY_S,
    BucketStatus,
    Kind,
    Limiter,
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
CONNECTIONS = 64
# After a failure Redis is not called for this long: requests must not queue up behind it.
CIRCUIT_OPEN_S = 1.0
# Leases of ended requests that Redis has not heard of, of all tenants: about 1 MB.
MAX_UNRELEASED = 10_000

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

_ACQUIRE_SCRIPT = (
    _BUCKET_FUNCTIONS
    + """
local limits = {requests = tonumber(ARGV[1]), tokens = tonumber(ARGV[3])}
local amounts = {requests = tonumber(ARGV[2]), tokens = tonumber(ARGV[4])}
local most, lease, lease_s = tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7])
local limited, wait, never, levels = '', 0, 0, {}
if most > 0 and lease ~= '' then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  if redis.call('ZCARD', KEYS[2]) >= most then limited, wait = 'concurrent', tonumber(ARGV[8]) end
end
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
  if most > 0 and lease ~= '' then
    redis.call('ZADD', KEYS[2], now + lease_s, lease)
    redis.call('EXPIRE', KEYS[2], math.ceil(lease_s) + 60)
  end
end
local function text(level) return level and string.format('%.6f', level) or '' end
return {limited, tostring(wait), never, text(levels.requests), text(levels.tokens)}
"""
)

_RELEASE_SCRIPT = (
    _BUCKET_FUNCTIONS
    + """
local limit, amount = tonumber(ARGV[1]), tonumber(ARGV[2])
for i = 3, #ARGV do redis.call('ZREM', KEYS[2], ARGV[i]) end
local level = filled('tokens', limit)
if level ~= nil and amount ~= 0 then keep('tokens', limit, math.min(limit, level + amount)) end
return 0
"""
)


@dataclass
class _Unreleased:
    """What Redis has not heard of a tenant's requests that have ended."""

    tenant: Tenant
    tokens: int = 0
    leases: list[str] = field(default_factory=list)


class RedisLimiter:
    """Limits counted in Redis, and by `fallback` while Redis does not answer.

    A release that fails is sent again. If Redis only answered too late, its tokens are returned
    twice, and its bucket takes no more than its size.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float,
        fallback: Limiter | None = None,
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
        self._acquire_script = self._redis.register_script(_ACQUIRE_SCRIPT)
        self._release_script = self._redis.register_script(_RELEASE_SCRIPT)
        self._timeout_s = timeout_s
        self._fallback = fallback or MemoryLimiter()
        self._clock = clock
        self._circuit_open_until = 0.0
        self._unreleased: dict[str, _Unreleased] = {}
        self._returning = asyncio.Lock()

    async def acquire(self, tenant: Tenant, quota: QuotaRequest) -> RateLimitDecision:
        """Check and take, as `Limiter.acquire` says."""
        arguments: list[str | int | float] = [
            *(tenant.requests_per_minute or 0, quota.requests),
            *(tenant.tokens_per_minute or 0, quota.tokens),
            *(tenant.max_concurrent or 0, quota.lease, quota.lease_s, CONCURRENT_RETRY_S),
        ]
        if _unlimited(tenant):
            return RateLimitDecision()
        answer = None
        if not self._circuit_open:
            answer = await self._call(lambda: self._run(self._acquire_script, tenant, arguments))
            if answer is None:  # Redis may have taken the lease, and answered too late
                self._keep(tenant, 0, quota.lease)
        if answer is None:
            metrics.LIMITER_FALLBACKS.inc()
            decision = await self._fallback.acquire(tenant, quota)
            return replace(decision, limiter=self._fallback)
        limited, wait, never, requests, tokens = answer
        return RateLimitDecision(
            _kind(limited),
            float(wait),
            bool(int(never)),
            _bucket_status(tenant.requests_per_minute, requests),
            _bucket_status(tenant.tokens_per_minute, tokens),
        )

    async def release(self, tenant: Tenant, *, tokens: int = 0, lease: str = "") -> None:
        """Return tokens and end a lease, as `Limiter.release` says; later, if Redis fails."""
        if _unlimited(tenant):
            return
        answer = None
        try:
            if not self._circuit_open:
                arguments = [tenant.tokens_per_minute or 0, tokens, lease]
                answer = await self._call(
                    lambda: self._run(self._release_script, tenant, arguments)
                )
        finally:  # also if the request's task is cancelled meanwhile
            if answer is None:
                self._keep(tenant, tokens, lease)

    async def keep_returning(self) -> None:
        """Release what Redis has not heard of until cancelled, also while no request comes."""
        while True:
            await asyncio.sleep(CIRCUIT_OPEN_S)
            if not self._circuit_open:
                await self._return_all()

    async def close(self) -> None:
        """Release what Redis has not heard of, and close the connections to it."""
        await self._return_all()
        await self._redis.aclose()

    @property
    def _circuit_open(self) -> bool:
        """Whether Redis failed a moment ago, and is not called."""
        return self._clock() < self._circuit_open_until

    def _keep(self, tenant: Tenant, tokens: int, lease: str) -> None:
        """Keep a release until Redis answers."""
        if not tokens and not lease:
            return
        kept = self._unreleased.setdefault(tenant.name, _Unreleased(tenant))
        kept.tenant, kept.tokens = tenant, kept.tokens + tokens
        if lease and sum(len(each.leases) for each in self._unreleased.values()) < MAX_UNRELEASED:
            kept.leases.append(lease)  # one too many ends by itself, after its `lease_s`

    async def _return_all(self) -> None:
        """Release what was kept of all tenants, until Redis fails."""
        for name in list(self._unreleased):
            if await self._call(partial(self._return_kept, name)) is None:
                return

    async def _return_kept(self, name: str) -> bool:
        """Release what was kept of one tenant. Raises RedisError, and keeps it."""
        async with self._returning:  # or it is returned twice
            if (kept := self._unreleased.get(name)) is None:
                return True
            tokens, leases = kept.tokens, list(kept.leases)
            limit = kept.tenant.tokens_per_minute or 0
            await self._release_script(keys=_keys(kept.tenant), args=[limit, tokens, *leases])
            kept.tokens -= tokens  # more may have come meanwhile
            del kept.leases[: len(leases)]
            if not kept.tokens and not kept.leases:
                del self._unreleased[name]
        return True

    async def _run(self, script: AsyncScript, tenant: Tenant, arguments: Sequence[Any]) -> Any:
        """Run a script for a tenant. What was kept of the tenant is released first."""
        if tenant.name in self._unreleased:
            await self._return_kept(tenant.name)
        return await script(keys=_keys(tenant), args=arguments)

    async def _call(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """The result of work with Redis, None if Redis fails or does not answer in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await work()
        except (RedisError, OSError, TimeoutError) as error:
            logger.warning("Redis does not answer, this gateway counts limits by itself: %r", error)
            self._circuit_open_until = self._clock() + CIRCUIT_OPEN_S
            return None


def _keys(tenant: Tenant) -> list[str]:
    """The tenant's keys in Redis. The braces keep both on one node of a cluster."""
    return [f"aerie:{{{tenant.name}}}:buckets", f"aerie:{{{tenant.name}}}:leases"]


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
