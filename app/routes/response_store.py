"""Responses that later requests can build on, in this process's memory."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Item = dict[str, Any]


@dataclass(frozen=True)
class StoredResponse:
    """A response, and the input that it answered, earlier turns included."""

    input: list[Item]
    response: dict[str, Any]


@dataclass(frozen=True)
class _Entry:
    data: bytes
    item_ids: tuple[str, ...]


class ResponseStore:
    """Responses by tenant and id. Each tenant has its own `limit_bytes`: a new response replaces
    its oldest ones. What is older than `ttl_s` is forgotten at the next call, of any tenant."""

    def __init__(
        self, limit_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit_bytes = limit_bytes
        self.ttl_s = ttl_s
        self._clock = clock
        self._tenants: dict[str, _TenantResponses] = {}
        # (tenant, id) -> when it expires, of all tenants: responses expire as they came.
        self._expiry: OrderedDict[tuple[str, str], float] = OrderedDict()

    def put(self, tenant: str, response_id: str, stored: StoredResponse) -> bool:
        """Keep a response; False if it is larger than all that a tenant may keep."""
        self._forget_expired()
        data = json.dumps({"input": stored.input, "response": stored.response}).encode()
        if len(data) > self.limit_bytes:
            return False
        self._remove(tenant, response_id)
        history = self._tenants.setdefault(tenant, _TenantResponses())
        items = stored.response.get("output", ())
        ids = tuple(item["id"] for item in items if isinstance(item.get("id"), str))
        history.add(response_id, _Entry(data, ids))
        self._expiry[tenant, response_id] = self._clock() + self.ttl_s
        while history.size > self.limit_bytes:
            self._remove(tenant, next(iter(history.entries)))
        return True

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """A tenant's response, if it is still kept."""
        entry = self._current(tenant).entries.get(response_id)
        return None if entry is None else StoredResponse(**json.loads(entry.data))

    def item(self, tenant: str, item_id: str) -> Item | None:
        """An item of the output of any response that the tenant still has."""
        response_id = self._current(tenant).items.get(item_id)
        stored = self.get(tenant, response_id) if response_id is not None else None
        items = stored.response["output"] if stored is not None else ()
        return next((item for item in items if item.get("id") == item_id), None)

    def delete(self, tenant: str, response_id: str) -> bool:
        """Forget a response; False if there is none."""
        self._forget_expired()
        return self._remove(tenant, response_id)

    def _current(self, tenant: str) -> _TenantResponses:
        """What a tenant has that has not expired."""
        self._forget_expired()
        return self._tenants.get(tenant) or _TenantResponses()

    def _forget_expired(self) -> None:
        now = self._clock()
        while self._expiry:
            oldest, expires_at = next(iter(self._expiry.items()))
            if expires_at > now:
                return
            self._remove(*oldest)

    def _remove(self, tenant: str, response_id: str) -> bool:
        history = self._tenants.get(tenant)
        if history is None or not history.remove(response_id):
            return False
        del self._expiry[tenant, response_id]
        if not history.entries:
            del self._tenants[tenant]
        return True


class _TenantResponses:
    """The entries of one tenant, oldest first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, _Entry] = OrderedDict()
        self.items: dict[str, str] = {}  # id of an output item -> id of its response
        self.size = 0

    def add(self, response_id: str, entry: _Entry) -> None:
        self.entries[response_id] = entry
        self.items.update(dict.fromkeys(entry.item_ids, response_id))
        self.size += len(entry.data)

    def remove(self, response_id: str) -> bool:
        entry = self.entries.pop(response_id, None)
        if entry is None:
            return False
        self.size -= len(entry.data)
        for item_id in entry.item_ids:
            if self.items.get(item_id) == response_id:
                del self.items[item_id]
        return True
