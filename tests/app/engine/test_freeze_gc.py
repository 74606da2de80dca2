"""What the garbage collector still looks at once the engine is up."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from app.engine.freeze_gc import freeze_gc


class Node:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Nothing is frozen before a test, whatever the tests before it left, and nothing after."""
    gc.unfreeze()
    yield
    gc.unfreeze()


def test_a_full_collection_leaves_out_what_was_there_before() -> None:
    old = Node()
    assert gc.get_freeze_count() == 0
    freeze_gc()
    assert gc.get_freeze_count() > 0
    assert not any(thing is old for thing in gc.get_objects())
    young = Node()
    assert any(thing is young for thing in gc.get_objects())


def test_what_an_engine_leaves_behind_is_gone_with_the_next() -> None:
    gone = Node()
    ended = weakref.ref(gone)
    freeze_gc()
    del gone
    gc.collect()
    assert ended() is not None
    freeze_gc()
    assert ended() is None
