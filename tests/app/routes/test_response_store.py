"""Responses in memory: bounds, age, and one tenant's apart from another's."""

from __future__ import annotations

import gc
import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from app.routes.response_store import ResponseStore, StoredItem, StoredResponse
from tests.clock import Clock


def stored(name: str, text: str = "x") -> StoredResponse:
    items = [{"role": "user", "content": "hi"}]
    return StoredResponse.of(items, {"id": name, "output": [message(name, text)]})


def message(name: str, text: str = "x") -> dict[str, Any]:
    return {"type": "message", "id": f"msg_{name}", "content": text}


def test_what_is_kept_comes_back() -> None:
    store = ResponseStore(1000, 60)
    assert store.put("a", "r1", stored("r1"))
    kept = store.get("a", "r1")
    assert kept is not None and kept == stored("r1")
    assert json.loads(kept.body) == {"id": "r1", "output": [message("r1")]}
    assert [json.loads(item.data)["content"] for item in kept.conversation] == ["hi", "x"]
    assert store.item("a", "msg_r1") == StoredItem.of(message("r1"))
    assert store.get("a", "r2") is None
    assert store.item("a", "msg_r2") is None


def test_a_text_takes_the_room_of_its_utf_8() -> None:
    """Catches: escapes, with which a Chinese conversation takes twice as much of the bounds."""
    kept = stored("r", "\u6c49\u5b57")
    for data in (kept.body, kept.output[0].data):
        assert "\u6c49\u5b57".encode() in data


def test_all_tenants_together_have_a_bound() -> None:
    """The tenant with most makes room, and one with little keeps what it has."""
    size = stored("r").size
    store = ResponseStore(10 * size, 60, total_bytes=31 * size)
    assert store.put("small", "r", stored("r"))
    for tenant in "abcdef":
        for number in range(10):
            assert store.put(tenant, f"r{number}", stored("r"))
            assert store.size <= store.total_bytes
    assert store.get("small", "r") is not None
    assert store.get("a", "r0") is None
    held = sum(store.get(t, f"r{number}") is not None for t in "abcdef" for number in range(10))
    assert (held + 1) * size == store.size == store.total_bytes
    assert REGISTRY.get_sample_value("aerie_stored_responses_bytes") == store.size


def test_tenants_see_their_own() -> None:
    store = ResponseStore(1000, 60)
    store.put("a", "r1", stored("r1"))
    assert store.get("b", "r1") is None
    assert store.item("b", "msg_r1") is None
    assert not store.delete("b", "r1")
    assert store.delete("a", "r1")
    assert store.get("a", "r1") is None
    assert store.item("a", "msg_r1") is None


def test_a_response_expires() -> None:
    clock = Clock(0)
    store = ResponseStore(10_000, 60, clock)
    store.put("a", "r1", stored("r1"))
    clock.now = 30
    store.put("a", "r2", stored("r2"))
    clock.now = 60
    assert store.get("a", "r1") is None
    assert store.get("a", "r2") is not None
    clock.now = 90
    assert store.get("a", "r2") is None
    assert store._tenants == {}


@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["put", "get", "item", "delete"]),
            st.sampled_from("abc"),
            st.integers(0, 4),
            st.integers(0, 40),
        ),
        max_size=40,
    )
)
def test_nothing_older_is_held_for_any_tenant(calls: list[tuple[str, str, int, int]]) -> None:
    """Whichever tenant a call is for, and whether the others ever come back."""
    clock = Clock()
    store = ResponseStore(2000, 60, clock)
    came: dict[tuple[str, str], float] = {}
    for call, tenant, number, seconds in calls:
        clock.now += seconds
        name = f"r{number}"
        if call == "put":
            assert store.put(tenant, name, stored(name))
            came[tenant, name] = clock.now
        elif call == "item":
            store.item(tenant, f"msg_{name}")
        else:
            getattr(store, call)(tenant, name)
        held = {(who, one) for who, rest in store._tenants.items() for one in rest.entries}
        assert all(clock.now < came[one] + 60 for one in held)
        assert held == set(store._expiry)
        assert list(store._expiry.values()) == sorted(store._expiry.values())
        assert all(history.entries for history in store._tenants.values())
        for history in store._tenants.values():
            assert history.size == sum(entry.size for entry in history.entries.values())
            assert len(history.items) == len(history.entries)


@pytest.mark.parametrize("items", [1, 100])
@pytest.mark.parametrize("length", [1, 1000])
def test_the_size_of_a_response_is_what_it_takes_in_memory(items: int, length: int) -> None:
    """Within a third: most of a short item is not its JSON."""
    gc.freeze()  # what vLLM has on the heap is not looked through
    tracemalloc.start()
    try:
        kept = StoredResponse.of([message(str(i), "x" * length) for i in range(items)], {"id": "r"})
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        gc.unfreeze()
    assert taken < 4 / 3 * kept.size + 1000


@given(sizes=st.lists(st.integers(0, 400), max_size=30), limit=st.integers(0, 3000))
def test_a_tenant_never_has_more_than_its_bytes(sizes: list[int], limit: int) -> None:
    """The newest are kept, the oldest make room."""
    store = ResponseStore(limit, 60)
    kept: list[str] = []
    for number, size in enumerate(sizes):
        if store.put("a", f"r{number}", stored(f"r{number}", "x" * size)):
            kept.append(f"r{number}")
        tenant: Any = store._tenants.get("a")
        held = sum(entry.size for entry in tenant.entries.values()) if tenant else 0
        assert held == (tenant.size if tenant else 0) <= limit
    have = [name for name in kept if store.get("a", name) is not None]
    assert have == kept[len(kept) - len(have) :]
    assert not kept or have
