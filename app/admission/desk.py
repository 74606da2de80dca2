"""Keys, quotas and the gate of one gateway, put together from its settings."""

from __future__ import annotations

import ipaddress
import logging
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from app.admission.gate import Gate
from app.admission.limiter import Limiter, MemoryLimiter
from app.admission.store import KeyStore
from app.admission.tenants import Identity, Tenant
from app.background import BackgroundTask
from app.settings import Settings

logger = logging.getLogger(__name__)

# Places beyond one batch: who comes next is in the engine before a sequence has ended.
AHEAD = 1 / 8
# Of the places' number, how many may wait in an overload that lasts: with those who are ahead,
# enough to fill what gets free.
OVERLOADED = 1 / 8
ANONYMOUS = "anonymous"


class Load(Protocol):
    """How full the engine is (app/engine/load.py)."""

    capacity: int

    @property
    def waiting(self) -> int:
        """Requests that the engine has taken and not begun."""

    @property
    def queued(self) -> int:
        """Those of them that wait because the engine is full."""

    @property
    def kv_usage(self) -> float:
        """Share of its KV cache in use."""


class Desk:
    """Everything that decides about a request before it reaches the engine."""

    def __init__(self, settings: Settings, load: Load) -> None:
        self.settings = settings.admission
        self.load = load
        self.keys = KeyStore(self.settings)
        self.background: tuple[BackgroundTask, ...] = ()
        if self.keys.watched:
            self.background = (BackgroundTask("keys_file", self.keys.watch),)
        self.limiter: Limiter = MemoryLimiter()
        if self.settings.redis_url is not None:
            from app.admission.shared import SharedLimiter

            self.limiter = SharedLimiter(self.settings.redis_url, self.settings.redis_timeout_s)
        self.gate = Gate(self._places, self._most_waiting, self._pressed)
        self.public = frozenset(
            path.strip() for path in self.settings.public_paths.split(",") if path.strip()
        )
        local = is_loopback(settings.server.host)
        self.body_bytes = 0  # of all requests that are here
        self.most_body_bytes = int(settings.server.max_bodies_mib * 2**20)
        self._anonymous = Identity(Tenant(name=ANONYMOUS), admin=local)
        if not self.keys.guarded and not local:
            logger.warning(
                "no API keys are configured and %s is no loopback address: whoever reaches this "
                "port can use it (see --keys-file)",
                settings.server.host,
            )

    def identify(self, secret: bytes | None) -> Identity | None:
        """The owner of a key; without configured keys, everybody is the anonymous tenant, who
        may use admin routes only where the gateway listens to its own machine alone."""
        if not self.keys.guarded:
            return self._anonymous
        return self.keys.ring.find(secret) if secret is not None else None

    def cache_tenant(self, tenant: Tenant) -> str | None:
        """Whose entries of the prefix cache a tenant's requests may use; None where all share."""
        if not self.keys.guarded or self.settings.share_prefix_cache:
            return None
        return tenant.name

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Follow the keys file while the gateway runs."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.limiter.close)
            for task in self.background:
                await stack.enter_async_context(task)
            yield

    def _places(self) -> int:
        if self.settings.max_running is not None:
            return self.settings.max_running
        return max(1, math.ceil(self.load.capacity * (1 + AHEAD)))

    def _most_waiting(self, overloaded: bool) -> int:
        if self.settings.max_waiting is not None:
            return self.settings.max_waiting
        return math.ceil(self._places() * OVERLOADED) if overloaded else self._places()

    def _pressed(self) -> bool:
        """Whether the engine itself has begun to queue, or its KV cache is nearly full."""
        if self.load.kv_usage >= self.settings.max_kv_usage:
            return True
        return self.load.queued > self._places() * AHEAD


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
