"""The bounds of a JSON text, against a walk through what it means."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.json_structure import Bounds, at_most, exceeded

# Texts with everything that ends a string, escapes it, or looks like structure inside of it.
TEXTS = st.text(st.sampled_from('"\\[]{},:/nu0dé😀\n\t'), max_size=8)
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=30,
)
ANY = 10**9


def size(value: Any) -> tuple[int, int, int]:
    """Separators, containers and depth, counted one by one."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    entries = value if isinstance(value, list) else list(value.values())
    inner = [size(entry) for entry in entries]
    containers = 1 + sum(each[1] for each in inner)
    separators = 1 + max(0, len(entries) - 1) + sum(each[0] for each in inner)
    return separators, containers, 1 + max((each[2] for each in inner), default=0)


@given(DOCUMENTS, st.booleans(), st.sampled_from([None, 1]))
def test_every_bound_is_exact(document: Any, escaped: bool, indent: int | None) -> None:
    """A bound that is met passes and one that is missed by one is named, whatever the strings
    hold: a count of raw characters would refuse prose for its commas."""
    data = json.dumps(document, ensure_ascii=escaped, indent=indent).encode()
    values, containers, depth = size(document)
    assert exceeded(data, Bounds(values, containers, depth)) is None
    for name, bounds in (
        ("values", Bounds(values - 1, ANY, ANY)),
        ("containers", Bounds(ANY, containers - 1, ANY)),
        ("depth", Bounds(ANY, ANY, depth - 1)),
    ):
        if min(bounds.values, bounds.containers, bounds.depth) >= 0:
            assert exceeded(data, bounds) == name


@given(st.lists(DOCUMENTS, max_size=4))
def test_several_texts_share_a_bound(documents: list[Any]) -> None:
    texts = [json.dumps(document) for document in documents]
    values = sum(size(document)[0] for document in documents)
    assert at_most(texts, values)
    assert values == 0 or not at_most(texts, values - 1)


@given(DOCUMENTS, TEXTS)
def test_what_stands_before_a_mistake_is_counted(document: Any, rest: str) -> None:
    """A parser has built all of it when it notices the mistake."""
    data = json.dumps(document).encode() + b" x" + rest.encode()
    values, _, depth = size(document)
    if values > 0:
        assert exceeded(data, Bounds(values - 1, ANY, ANY)) == "values"
        assert exceeded(data, Bounds(ANY, ANY, depth - 1)) is not None


@pytest.mark.parametrize("backslashes", range(1, 7))
def test_a_quote_behind_backslashes_ends_its_string_or_does_not(backslashes: int) -> None:
    """An even number of them is itself escaped."""
    data = b'["' + b"\\" * backslashes + b'", [[[1]]]]' + b'"]' * (backslashes % 2)
    deep = exceeded(data, Bounds(ANY, ANY, 1)) == "depth"
    assert deep == (backslashes % 2 == 0)


@pytest.mark.parametrize(
    "data",
    [b'"' * 2**20, b'["' + b'\\"' * 2**19 + b'"]', b"[" + b'"",' * 2**18, b"\\" * 2**20],
    ids=["quotes", "escaped-quotes", "strings", "backslashes"],
)
def test_counting_builds_nothing_large(data: bytes) -> None:
    """A text of quotes alone is refused by their number before it is cut into pieces."""
    assert exceeded(data, Bounds(1000, 1000, 10)) in ("values", None)
