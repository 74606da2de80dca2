"""Rate limits of a tenant: requests and tokens per minute, and requests at once.

Requests and tokens come out of token buckets that hold one minute's worth and fill steadily.
A request acquires its estimated tokens under the name of its lease, and what it used takes their
place when it has ended. So a bucket can go below zero: a tenant that used more than estimated waits
longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from app.admission.tenants import Tenant

Kind = Literal["requests", "tokens", "concurrent"]
MINUTE = 60.0
# When a concurrent request will end is unknown: soon, for most.
CONCURRENT_RETRY_S = 1.0


@dataclass(frozen=True)
class QuotaRequest:
    """What a request takes from its tenant's limits.

    `lease` names the request: its release ends its place among the tenant's concurrent requests,
    where `concurrent` says that it takes one, and returns its tokens.
    """

    requests: int = 0
    tokens: int = 0
    concurrent: bool = False
    lease: str = ""


@dataclass(frozen=True)
class BucketStatus:
    """State of one token bucket after a decision, for the rate limit headers."""

    limit: int
    remaining: int
    reset_s: float  # until it is full


@dataclass(frozen=True)
class RateLimitDecision:
    """Whether a request is within the limits, and if not, which one is used up.

    `never` is whether even a full bucket is too small for the request. `limiter` is the one that
    counted it, and takes its release; None: the one that was asked.
    """

    limited: Kind | None = None
    retry_after_s: float = 0.0
    never: bool = False
    requests: BucketStatus | None = None
    tokens: BucketStatus | None = None
    limiter: Limiter | None = None


class Limiter(Protocol):
    """Keeps the limits of all tenants. A request acquires all of its quota or nothing."""

    async def acquire(self, tenant: Tenant, quota: QuotaRequest) -> RateLimitDecision:
        """Check all limits and take from them, as one atomic step."""

    async def release(self, tenant: Tenant, lease: str, *, used: int = 0) -> None:
        """End a lease: its place is free, and the tokens that it used replace those that it took.
        A lease that took nothing, or was released before, changes nothing."""

    async def close(self) -> None:
        """Close the connections, if there are any."""


@dataclass
class _Bucket:
    level: float
    at: float


@dataclass
class _TenantState:
    """Token buckets of one tenant, its leases with a place, and the tokens that leases took."""

    buckets: dict[str, _Bucket] = field(default_factory=dict)
    places: set[str] = field(default_factory=set)
    charges: dict[str, int] = field(default_factory=dict)


class MemoryLimiter:
    """Limits counted in this process. `acquire` never awaits: requests cannot race each other."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tenants: dict[str, _TenantState] = {}

    async def acquire(self, tenant: Tenant, quota: QuotaRequest) -> RateLimitDecision:
        """Check and take, as `Limiter.acquire` says."""
        now = self._clock()
        state = self._tenants.setdefault(tenant.name, _TenantState())
        requests = self._level(state, "requests", tenant.requests_per_minute, now)
        tokens = self._level(state, "tokens", tenant.tokens_per_minute, now)
        limited: Kind | None = None
        wait_s, never = 0.0, False
        takes_place = quota.concurrent and tenant.max_concurrent is not None
        if takes_place and len(state.places) >= (tenant.max_concurrent or 0):
            limited, wait_s = "concurrent", CONCURRENT_RETRY_S
        for kind, bucket, amount, limit in (
            ("requests", requests, quota.requests, tenant.requests_per_minute),
            ("tokens", tokens, quota.tokens, tenant.tokens_per_minute),
        ):
            if bucket is not None and limit is not None and amount > bucket.level:
                limited = "requests" if kind == "requests" else "tokens"
                never = never or amount > limit
                wait_s = max(wait_s, (amount - bucket.level) * MINUTE / limit)
        if limited is None:
            if requests is not None:
                requests.level -= quota.requests
            if tokens is not None:
                tokens.level -= quota.tokens
                if quota.tokens:
                    state.charges[quota.lease] = quota.tokens
            if takes_place:
                state.places.add(quota.lease)
        return RateLimitDecision(
            limited,
            wait_s,
            never,
            bucket_status(tenant.requests_per_minute, requests.level if requests else None),
            bucket_status(tenant.tokens_per_minute, tokens.level if tokens else None),
        )

    async def release(self, tenant: Tenant, lease: str, *, used: int = 0) -> None:
        """End a lease, as `Limiter.release` says."""
        state = self._tenants.setdefault(tenant.name, _TenantState())
        state.places.discard(lease)
        charged = state.charges.pop(lease, None)
        bucket = self._level(state, "tokens", tenant.tokens_per_minute, self._clock())
        if bucket is not None and charged is not None:
            bucket.level += charged - used  # `_level` caps it

    async def close(self) -> None:
        """Do nothing: there are no connections."""

    @staticmethod
    def _level(state: _TenantState, kind: str, limit: int | None, now: float) -> _Bucket | None:
        """The bucket, refilled up to now and capped at `limit`, which may have been lowered."""
        if limit is None:
            return None
        bucket = state.buckets.setdefault(kind, _Bucket(limit, now))
        filled = bucket.level + (now - bucket.at) * limit / MINUTE
        bucket.level, bucket.at = min(float(limit), filled), now
        return bucket


def bucket_status(limit: int | None, level: float | None) -> BucketStatus | None:
    """The bucket as the rate limit headers show it; None without a limit."""
    if limit is None or level is None:
        return None
    return BucketStatus(limit, max(0, int(level)), (limit - level) * MINUTE / limit)
