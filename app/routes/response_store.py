"""Responses that later requests can build on, in this process's memory."""

from __future__ import annotations

import json
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from app.observability import metrics

# What an item takes in memory beside its JSON, about.
ITEM_BYTES = 200


@dataclass(frozen=True, slots=True)
class StoredItem:
    """One item of a conversation, and its JSON."""

    id: str | None
    data: bytes

    @classmethod
    def of(cls, item: Any) -> StoredItem:
        """The item in JSON."""
        item_id = item.get("id") if isinstance(item, dict) else None
        return cls(item_id if isinstance(item_id, str) else None, to_json(item))


@dataclass(frozen=True)
class StoredResponse:
    """A response, and the conversation that its next turn continues, in JSON.

    The conversation is kept item by item. It may be as large as all that a tenant may keep, and a
    thread that parses a text holds Python's global lock until it is done: no text is longer than an
    item, and only those that are asked for are parsed.
    """

    input: tuple[StoredItem, ...]  # what it answered, earlier turns included
    output: tuple[StoredItem, ...]  # without logprobs, on which no later turn depends
    body: bytes  # the whole response

    @classmethod
    def of(cls, items: Iterable[Any], response: dict[str, Any]) -> StoredResponse:
        """The response in JSON. The time that it takes grows with the conversation."""
        output = map(_without_logprobs, response.get("output", ()))
        return cls(
            tuple(map(StoredItem.of, items)),
            tuple(map(StoredItem.of, output)),
            to_json(response),
        )

    @property
    def conversation(self) -> tuple[StoredItem, ...]:
        """The items that the next turn continues."""
        return self.input + self.output

    @property
    def size(self) -> int:
        """Bytes that it takes in memory."""
        items = self.conversation
        return len(self.body) + sum(len(item.data) for item in items) + ITEM_BYTES * len(items)


def _without_logprobs(item: Any) -> Any:
    content = item.get("content") if isinstance(item, dict) else None
    if not isinstance(content, list):
        return item
    parts = [
        {name: value for name, value in part.items() if name != "logprobs"}
        if isinstance(part, dict)
        else part
        for part in content
    ]
    return {**item, "content": parts}


def to_json(value: Any) -> bytes:
    """The value's JSON in UTF-8. With escapes, most scripts would take twice the room."""
    return json.dumps(value, ensure_ascii=False).encode()


def json_list(items: Iterable[StoredItem]) -> bytes:
    """A JSON list of the items."""
    return b"[" + b", ".join(item.data for item in items) + b"]"


class ResponseStore:
    """Responses by tenant and id.

    Each tenant has its own `limit_bytes`: a new response replaces its oldest ones. Beyond
    `total_bytes` of all tenants it replaces the oldest ones of the tenant that has most. What is
    older than `ttl_s` is forgotten at the next call, of any tenant.
    """

    def __init__(
        self,
        limit_bytes: int,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        total_bytes: int = sys.maxsize,
    ) -> None:
        self.total_bytes = total_bytes
        self.limit_bytes = min(limit_bytes, total_bytes)
        self.ttl_s = ttl_s
        self.size = 0  # bytes, of all tenants
        self._clock = clock
        self._tenants: dict[str, _TenantResponses] = {}
        # (tenant, id) -> when it expires, of all tenants: responses expire as they came.
        self._expiry: OrderedDict[tuple[str, str], float] = OrderedDict()

    def put(self, tenant: str, response_id: str, stored: StoredResponse) -> bool:
        """Keep a response; False if it is larger than all that a tenant may keep, or if others have
        less and need the room."""
        self._forget_expired()
        if stored.size > self.limit_bytes:
            return False
        self._remove(tenant, response_id)
        history = self._tenants.setdefault(tenant, _TenantResponses())
        history.add(response_id, stored)
        self._add_size(stored.size)
        self._expiry[tenant, response_id] = self._clock() + self.ttl_s
        while history.size > self.limit_bytes:
            self._remove(tenant, next(iter(history.entries)))
        while self.size > self.total_bytes:
            largest = max(self._tenants, key=lambda name: self._tenants[name].size)
            self._remove(largest, next(iter(self._tenants[largest].entries)))
        return response_id in history.entries

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """A tenant's response, if it is still kept."""
        return self._current(tenant).entries.get(response_id)

    def item(self, tenant: str, item_id: str) -> StoredItem | None:
        """An item of the output of any response that the tenant still has."""
        return self._current(tenant).items.get(item_id)

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
        if history is None:
            return False
        size = history.size
        if not history.remove(response_id):
            return False
        self._add_size(history.size - size)
        del self._expiry[tenant, response_id]
        if not history.entries:
            del self._tenants[tenant]
        return True

    def _add_size(self, size: int) -> None:
        self.size += size
        metrics.STORED_RESPONSE_BYTES.set(self.size)


class _TenantResponses:
    """The entries of one tenant, oldest first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self.items: dict[str, StoredItem] = {}  # items of their output, by id
        self.size = 0

    def add(self, response_id: str, stored: StoredResponse) -> None:
        self.entries[response_id] = stored
        self.items.update({item.id: item for item in stored.output if item.id is not None})
        self.size += stored.size

    def remove(self, response_id: str) -> bool:
        stored = self.entries.pop(response_id, None)
        if stored is None:
            return False
        self.size -= stored.size
        for item in stored.output:
            if item.id is not None and self.items.get(item.id) is item:
                del self.items[item.id]
        return True
