"""The admission controller: keys, rate limits and the admission queue of one gateway."""

from __future__ import annotations

import ipaddress
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol
from urllib.parse import urlsplit

from app.admission.key_store import KeyStore
from app.admission.limiter import Limiter, MemoryLimiter
from app.admission.queue import AdmissionQueue, Slot
from app.admission.tenants import Identity, Tenant
from app.background import BackgroundTask
from app.errors import ApiError
from app.settings import Settings
from drafters.loopback import is_loopback

logger = logging.getLogger(__name__)

# Slots beyond one batch, as a share of it: the next sequence is in the engine before one ends.
EXTRA_SLOTS_SHARE = 1 / 8
# Requests that may wait in a lasting overload, as a share of the slots: together with the extra
# slots they are enough to fill slots that get free.
OVERLOAD_QUEUE_SHARE = 1 / 8
STOPPED_RETRY_S = 5  # seconds after which a request that was ended by a stop may come again
ANONYMOUS = "anonymous"
# Requests to public paths beside keys. No tenant of a keys file can have a name with brackets, so
# that nobody shares its quota and its conversations with those who show no key.
PUBLIC = "(anonymous)"
# Ends of names that nobody can register: those of this machine, and of it within a container.
PRIVATE_NAMES = (".localhost", ".internal")


class EngineLoadView(Protocol):
    """How full the engine is, as far as admission needs it (app/llm/engine_load.py)."""

    capacity: int

    @property
    def running(self) -> int:
        """Requests in the engine's batch."""

    @property
    def waiting(self) -> int:
        """Requests that the engine has taken and not begun."""

    @property
    def deferred(self) -> int:
        """Requests among `waiting` that wait for something else than room."""

    @property
    def queued(self) -> int:
        """Requests among `waiting` that wait because the engine is full."""

    @property
    def kv_usage(self) -> float:
        """Share of the engine's KV cache in use."""


class OpenRequest(Protocol):
    """A request that was let in and has not ended (app/http/request_context.py)."""

    @property
    def slot(self) -> Slot | None:
        """Its slot in the engine, while it has one."""

    @property
    def in_engine(self) -> tuple[int, int]:
        """How many sequences the engine has of it: those with a token, and those without."""

    def end(self, error: ApiError) -> None:
        """Answer with an error, now."""


class AdmissionController:
    """Authenticates, limits and queues requests before they reach the engine."""

    def __init__(self, settings: Settings, load: EngineLoadView) -> None:
        self.settings = settings.admission
        self._learning = settings.learning
        self.load = load
        self.keys = KeyStore(self.settings)
        self.background: tuple[BackgroundTask, ...] = ()
        if self.keys.watched:
            self.background = (BackgroundTask("keys_file", self.keys.watch),)
        self.limiter: Limiter = MemoryLimiter()
        if self.settings.redis_url is not None:
            from app.admission.redis_limiter import RedisLimiter

            shared = RedisLimiter(self.settings.redis_url, self.settings.redis_timeout_s)
            self.background += (BackgroundTask("redis_leases", shared.keep_leases),)
            self.limiter = shared
        self.queue = AdmissionQueue(self._slots, self._max_waiting, self._engine_saturated)
        self.public = frozenset(
            path.strip() for path in self.settings.public_paths.split(",") if path.strip()
        )
        local = self._local = is_loopback(settings.server.host)
        self._origins = settings.server.origins
        self.open_requests: set[OpenRequest] = set()
        self.body_bytes = 0  # of all requests in progress
        self.body_bytes_by_tenant: Counter[str] = Counter()
        self.max_body_bytes = int(settings.server.max_bodies_mib * 2**20)
        self._anonymous = Identity(Tenant(name=ANONYMOUS), admin=local)
        self.forwarded_identity = Identity(Tenant(name=ANONYMOUS))
        self.public_identity = Identity(Tenant.model_construct(name=PUBLIC))
        if not self.keys.guarded and not local:
            logger.warning(
                "no API keys are configured and %s is no loopback address: whoever reaches this "
                "port can use it (see --keys-file)",
                settings.server.host,
            )

    def identify(self, secret: bytes | None) -> Identity | None:
        """The owner of a key, None for an unknown one.

        Without configured keys every request is the anonymous tenant's, which may use admin routes
        only if the gateway listens on a loopback address.
        """
        if not self.keys.guarded:
            return self._anonymous
        return self.keys.ring.find(secret) if secret is not None else None

    def is_foreign(self, host: str) -> bool:
        """Whether a request's `Host` shows that a web page may have made this machine's address its
        own (DNS rebinding), where nothing else would keep that page out.

        Only a name with a dot can be a page's that is not this machine's, and no page's name ends
        with one of PRIVATE_NAMES.
        """
        if self.keys.guarded or not self._local or "*" in self._origins:
            return False
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return True
        if "." not in name or name.endswith(PRIVATE_NAMES):
            return False
        if name in {urlsplit(origin).hostname for origin in self._origins}:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return True
        return False

    def cache_tenant(self, tenant: Tenant) -> str | None:
        """Name under which a tenant's prefix cache is kept apart; None where all tenants share."""
        if not self.keys.guarded or self.settings.share_prefix_cache:
            return None
        return tenant.name

    def captured_as(self, tenant: Tenant) -> str | None:
        """Name under which a tenant's sequences are captured, empty without keys; None where they
        are not."""
        if self._learning.learn is None or not tenant.learn:
            return None
        if tenant.name in self._learning.excluded:
            return None
        return tenant.name if self.keys.guarded else ""

    def excluded_from_capture(self) -> frozenset[str]:
        """Names under which sequences of tenants that are excluded now may have been captured
        before. Any thread may call it."""
        names = self._learning.excluded
        if not self.keys.guarded and ANONYMOUS in names:
            names |= {""}
        return names | {
            tenant.name for tenant in self.keys.ring.tenants.values() if not tenant.learn
        }

    def has_room_for_bodies(self, tenant: Tenant) -> bool:
        """Whether the bodies of all requests are within their bound, and this tenant's within half
        of it: slow uploads of one tenant leave room for the others. A tenant alone may have all."""
        most = self.max_body_bytes
        if any(name != tenant.name for name in self.keys.ring.tenants):
            most //= 2
        return (
            self.body_bytes <= self.max_body_bytes
            and self.body_bytes_by_tenant[tenant.name] <= most
        )

    def may_wait(self, slot: Slot) -> bool:
        """Whether a request with a slot and without a token may wait in the engine.

        The engine reports how many sequences run and wait, and not which. It begins them in the
        order in which they came, so that those that run without a token yet are the oldest. Where
        requests have several priorities or wait for a grammar, it may be any of them.
        """
        if not self.load.waiting:
            return False
        entered = [
            (other, *request.in_engine)
            for request in self.open_requests
            if (other := request.slot) is not None
        ]
        priorities = {other.tenant.priority for other, _, _ in entered}
        if self.load.deferred or len(priorities) > 1:
            return True
        begun = sum(with_token for _, with_token, _ in entered)
        older = sum(without for other, _, without in entered if other.number < slot.number)
        return older >= self.load.running - begun

    def end_all(self) -> None:
        """End all open requests: the gateway stops, and has waited long enough for them."""
        for request in list(self.open_requests):
            message = "The server is shutting down; try again later."
            headers = {"Retry-After": str(STOPPED_RETRY_S)}
            request.end(ApiError(503, message, code="shutting_down", headers=headers))

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Run the background tasks (the keys file's watcher, leases in Redis) meanwhile."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.limiter.close)
            for task in self.background:
                await stack.enter_async_context(task)
            yield

    def _slots(self) -> int:
        if self.settings.max_running is not None:
            return self.settings.max_running
        return max(1, math.ceil(self.load.capacity * (1 + EXTRA_SLOTS_SHARE)))

    def _max_waiting(self, overloaded: bool) -> int:
        if self.settings.max_waiting is not None:
            return self.settings.max_waiting
        return math.ceil(self._slots() * OVERLOAD_QUEUE_SHARE) if overloaded else self._slots()

    def _engine_saturated(self) -> bool:
        """Whether the engine itself has begun to queue, or its KV cache is nearly full."""
        if self.load.kv_usage >= self.settings.max_kv_usage:
            return True
        return self.load.queued > self._slots() * EXTRA_SLOTS_SHARE
