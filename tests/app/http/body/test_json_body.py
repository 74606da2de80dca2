"""A body's limits and its values, before anything looks at its fields."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import ApiError
from app.http.body.json_body import parse
from app.http.body.limits import BASE_BYTES, BASE_VALUES, MEDIA_BYTES, BodyLimits, body_limits
from app.json_structure import Bounds
from app.settings import load

LIMITS = BodyLimits(2**20, Bounds(values=200, containers=50, depth=10))


def refusal(data: bytes, limits: BodyLimits = LIMITS) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(data, limits)
    return caught.value


@pytest.mark.parametrize(
    ("data", "status", "message", "param"),
    [
        (b'{"prompt": [%s1]}' % (b"1," * 300), 400, "more than 200 JSON values", None),
        (b'{"a": [%s1]}' % (b"{}," * 60), 400, "more than 50 JSON lists and objects", None),
        (b'{"a": 1, "b": {"c": %s}}' % (b"[" * 9 + b"]" * 9), 400, "at most 10 levels", "b"),
        (b'{"a": %s, "a": 1}' % (b"[" * 10 + b"]" * 10), 400, "more than 10 levels", None),
        (b"[" * 40, 400, "not valid JSON", None),
    ],
)
def test_too_much_structure(data: bytes, status: int, message: str, param: str | None) -> None:
    error = refusal(data)
    assert (error.status, error.param) == (status, param)
    assert message in error.message


def test_structure_inside_of_texts_is_text() -> None:
    text = '{[(prose, with, commas, and "brackets")]}\\' * 200
    assert parse(json.dumps({"prompt": text}).encode(), LIMITS) == {"prompt": text}


SCALARS = st.integers() | st.text(max_size=5) | st.sampled_from(["\ud800", "\udc00a", "\ud83d"])
SCALARS |= st.sampled_from([2**63, -(2**63) - 1, 2**63 - 1, "9" * 25, "\\ud800", "\\\ud800"])
FIELDS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=10,
)


def usable(value: Any) -> bool:
    if isinstance(value, str):
        return not any(0xD800 <= ord(character) <= 0xDFFF for character in value)
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    if isinstance(value, list):
        return all(map(usable, value))
    return all(usable(name) and usable(entry) for name, entry in value.items())


@given(st.dictionaries(st.text(max_size=3), FIELDS, max_size=3), st.booleans())
def test_only_values_that_something_can_hold_pass(payload: dict[str, Any], lower: bool) -> None:
    """Surrogates and long integers are looked for only where the bytes may hold one: no way of
    writing them may slip past that."""
    data = json.dumps(payload)
    meant = json.loads(data)  # two halves that were written one after the other are one character
    data = data if lower else data.replace("\\ud", "\\uD")
    meant = json.loads(data)
    wide = BodyLimits(2**20, Bounds(10**6, 10**6, 100))
    if usable(meant):
        assert parse(data.encode(), wide) == meant
    else:
        assert refusal(data.encode(), wide).status == 400


@pytest.mark.parametrize(
    ("payload", "param"),
    [
        ({"tools": [{"function": {"parameters": {"maximum": 2**64}}}]}, None),
        ({"tools": [{}, {"tools": [{"parameters": {"a": [2**64]}}]}]}, None),
        ({"tools": [{"input_schema": {"enum": [2**64]}}]}, None),
        ({"response_format": {"json_schema": {"schema": {"maximum": 2**64}}}}, None),
        ({"text": {"format": {"schema": {"maximum": 2**64}}}}, None),
        ({"tools": [{"max_uses": 2**64}]}, "tools[0].max_uses"),
        ({"metadata": {"tools": [2**64]}}, "metadata.tools[0]"),
        ({"tools": [{"parameters": {"title": "\ud800"}}]}, "tools[0].parameters.title"),
    ],
)
def test_integers_of_schemas_may_have_any_length(
    payload: dict[str, Any], param: str | None
) -> None:
    data = json.dumps(payload).encode()
    if param is None:
        assert parse(data, LIMITS) == payload
    else:
        assert refusal(data).param == param


def test_the_limits_follow_from_the_context() -> None:
    settings = load({}, {}, preset="embedded")
    none, short, long = (body_limits(settings, n, False) for n in (None, 2048, 131_072))
    assert none.size == BASE_BYTES
    assert short.size < 2**20 + 2**17
    assert 4 * 2**20 < long.size < 8 * 2**20
    assert short.structure.values == BASE_VALUES + 2048  # a prompt of ids that fills the context
    assert long.structure.containers == BASE_VALUES
    assert body_limits(settings, 2048, True).size == MEDIA_BYTES
    assert body_limits(settings, 10**6, True).size == body_limits(settings, 10**6, False).size


def test_a_setting_beats_the_context() -> None:
    settings = load({"max_body_mib": "3", "max_body_values": "70000"}, {}, preset="embedded")
    limits = body_limits(settings, 131_072, True)
    assert limits.size == 3 * 2**20
    assert limits.structure == Bounds(70_000, 70_000, settings.limits.max_body_depth)
