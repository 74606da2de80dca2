"""How much a tenant may do: requests and tokens per minute, and requests at once.

Requests and tokens come out of token buckets that hold one minute's worth and fill steadily.
Tokens are taken as estimated and settled when the request has ended, so a bucket can go below
empty: who used more than estimated waits longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from app.admission.tenants import Tenant

Kind = Literal["requests", "tokens", "concurrent"]
MINUTE = 60.0
# A request that ends frees its place at no known time: soon, for most.
CONCURRENT_RETRY_S = 1.0


@dataclass(frozen=True)
class Ask:
    """What a request wants. `lease` names its place among the tenant's concurrent requests,
    which is held for at most `lease_s`, in case nobody gives it back."""

    requests: int = 0
    tokens: int = 0
    lease: str = ""
    lease_s: float = 0.0


@dataclass(frozen=True)
class Standing:
    """One bucket after a decision."""

    limit: int
    remaining: int
    reset_s: float  # until it is full


@dataclass(frozen=True)
class Verdict:
    """Yes, or what is used up and when to try again. `never` means: not even a full bucket."""

    limited: Kind | None = None
    retry_after_s: float = 0.0
    never: bool = False
    requests: Standing | None = None
    tokens: Standing | None = None


class Limiter(Protocol):
    """Either all that is asked for is taken or nothing is."""

    async def take(self, tenant: Tenant, ask: Ask) -> Verdict:
        """Decide and take, as one step that nothing comes between."""

    async def give(self, tenant: Tenant, *, tokens: int = 0, lease: str = "") -> None:
        """Tokens back (or, negative, taken on top), and a lease that has ended."""

    async def close(self) -> None:
        """Let go of what is held."""


@dataclass
class _Bucket:
    level: float
    at: float


@dataclass
class _Account:
    """One tenant's buckets, and its leases with their ends."""

    buckets: dict[str, _Bucket] = field(default_factory=dict)
    leases: dict[str, float] = field(default_factory=dict)


class MemoryLimiter:
    """Counts in this process. Nothing in `take` waits, so requests cannot race each other."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    async def take(self, tenant: Tenant, ask: Ask) -> Verdict:
        """See Limiter."""
        now = self._clock()
        account = self._accounts.setdefault(tenant.name, _Account())
        requests = self._level(account, "requests", tenant.requests_per_minute, now)
        tokens = self._level(account, "tokens", tenant.tokens_per_minute, now)
        limited: Kind | None = None
        wait_s, never = 0.0, False
        if ask.lease and tenant.max_concurrent is not None:
            account.leases = {name: end for name, end in account.leases.items() if end > now}
            if len(account.leases) >= tenant.max_concurrent:
                limited, wait_s = "concurrent", CONCURRENT_RETRY_S
        for kind, bucket, amount, limit in (
            ("requests", requests, ask.requests, tenant.requests_per_minute),
            ("tokens", tokens, ask.tokens, tenant.tokens_per_minute),
        ):
            if bucket is not None and limit is not None and amount > bucket.level:
                limited = "requests" if kind == "requests" else "tokens"
                never = never or amount > limit
                wait_s = max(wait_s, (amount - bucket.level) * MINUTE / limit)
        if limited is None:
            if requests is not None:
                requests.level -= ask.requests
            if tokens is not None:
                tokens.level -= ask.tokens
            if ask.lease and tenant.max_concurrent is not None:
                account.leases[ask.lease] = now + ask.lease_s
        return Verdict(
            limited,
            wait_s,
            never,
            standing(tenant.requests_per_minute, requests.level if requests else None),
            standing(tenant.tokens_per_minute, tokens.level if tokens else None),
        )

    async def give(self, tenant: Tenant, *, tokens: int = 0, lease: str = "") -> None:
        """See Limiter."""
        account = self._accounts.setdefault(tenant.name, _Account())
        account.leases.pop(lease, None)
        limit = tenant.tokens_per_minute
        bucket = self._level(account, "tokens", limit, self._clock())
        if bucket is not None and limit is not None:
            bucket.level = min(float(limit), bucket.level + tokens)

    async def close(self) -> None:
        """Nothing is held."""

    @staticmethod
    def _level(account: _Account, kind: str, limit: int | None, now: float) -> _Bucket | None:
        """The bucket, filled up to now; a limit that was lowered meanwhile caps it."""
        if limit is None:
            return None
        bucket = account.buckets.setdefault(kind, _Bucket(limit, now))
        filled = bucket.level + (now - bucket.at) * limit / MINUTE
        bucket.level, bucket.at = min(float(limit), filled), now
        return bucket


def standing(limit: int | None, level: float | None) -> Standing | None:
    """What the client is told about a bucket."""
    if limit is None or level is None:
        return None
    return Standing(limit, max(0, int(level)), (limit - level) * MINUTE / limit)
