"""The limiter for several gateways: the same buckets, kept in one Redis.

Each decision is one Lua script, which Redis runs as a whole: gateways cannot race each other.
Time is Redis's own, so the gateways' clocks do not matter. Without Redis a gateway goes on
with counts of its own: a limit is then per gateway, and nobody is turned away for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from app import metrics
from app.admission.limiter import (
    CONCURRENT_RETRY_S,
    Ask,
    Kind,
    Limiter,
    MemoryLimiter,
    Standing,
    Verdict,
    standing,
)
from app.admission.tenants import Tenant

logger = logging.getLogger(__name__)

T = TypeVar("T")
CONNECTIONS = 64
# After a failure Redis is left alone for this long: requests must not queue up behind it.
REST_S = 1.0

# Levels are kept as text: Lua numbers would lose their fractions on the way out.
_FILL = """
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

_TAKE = (
    _FILL
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

_GIVE = (
    _FILL
    + """
local limit, amount, lease = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
if lease ~= '' then redis.call('ZREM', KEYS[2], lease) end
local level = filled('tokens', limit)
if level ~= nil and amount ~= 0 then keep('tokens', limit, math.min(limit, level + amount)) end
return 0
"""
)


class SharedLimiter:
    """See Limiter."""

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
            # Once more, for a connection that Redis closed while it was idle.
            retry=Retry(NoBackoff(), 1),
            decode_responses=True,
        )
        self._redis = Redis.from_pool(pool)
        self._take = self._redis.register_script(_TAKE)
        self._give = self._redis.register_script(_GIVE)
        self._timeout_s = timeout_s
        self._fallback = fallback or MemoryLimiter()
        self._clock = clock
        self._rests_until = 0.0

    async def take(self, tenant: Tenant, ask: Ask) -> Verdict:
        """See Limiter."""
        arguments: list[str | int | float] = [
            *(tenant.requests_per_minute or 0, ask.requests),
            *(tenant.tokens_per_minute or 0, ask.tokens),
            *(tenant.max_concurrent or 0, ask.lease, ask.lease_s, CONCURRENT_RETRY_S),
        ]
        if _unlimited(tenant):
            return Verdict()
        answer = await self._asked(lambda: self._take(keys=_keys(tenant), args=arguments))
        if answer is None:
            return await self._fallback.take(tenant, ask)
        limited, wait, never, requests, tokens = answer
        return Verdict(
            _kind(limited),
            float(wait),
            bool(int(never)),
            _standing(tenant.requests_per_minute, requests),
            _standing(tenant.tokens_per_minute, tokens),
        )

    async def give(self, tenant: Tenant, *, tokens: int = 0, lease: str = "") -> None:
        """See Limiter."""
        if _unlimited(tenant):
            return
        arguments: list[str | int | float] = [tenant.tokens_per_minute or 0, tokens, lease]
        answer = await self._asked(lambda: self._give(keys=_keys(tenant), args=arguments))
        if answer is None:
            await self._fallback.give(tenant, tokens=tokens, lease=lease)
        else:  # it may be from before Redis came back
            await self._fallback.give(tenant, lease=lease)

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()

    async def _asked(self, ask: Callable[[], Awaitable[T]]) -> T | None:
        """What Redis says, None if it does not say anything in time."""
        if self._clock() < self._rests_until:
            metrics.LIMITER_FALLBACKS.inc()
            return None
        try:
            async with asyncio.timeout(self._timeout_s):
                return await ask()
        except (RedisError, OSError, TimeoutError) as error:
            logger.warning("Redis does not answer, limits are this gateway's own: %r", error)
            metrics.LIMITER_FALLBACKS.inc()
            self._rests_until = self._clock() + REST_S
            return None


def _keys(tenant: Tenant) -> list[str]:
    """The braces keep both on one node of a cluster."""
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


def _standing(limit: int | None, level: str) -> Standing | None:
    return standing(limit, float(level)) if level else None
