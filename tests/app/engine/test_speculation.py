"""The field `speculation` is honoured or refused."""

from __future__ import annotations

from typing import Any

import pytest

from app.engine.speculation import take_limit
from app.errors import ApiError


@pytest.mark.parametrize(
    ("given", "carried"),
    [
        ({}, {}),
        ({"speculation": None}, {}),
        ({"speculation": {}}, {}),
        ({"speculation": {"enabled": True}}, {}),
        ({"speculation": {"max_k": 3}}, {"vllm_xargs": {"aerie_max_k": 3}}),
        ({"speculation": {"max_k": 0}}, {"vllm_xargs": {"aerie_max_k": 0}}),
        ({"speculation": {"enabled": False}}, {"vllm_xargs": {"aerie_max_k": 0}}),
        ({"speculation": {"enabled": False, "max_k": 5}}, {"vllm_xargs": {"aerie_max_k": 0}}),
        ({"vllm_xargs": {"aerie_max_k": 2}}, {"vllm_xargs": {"aerie_max_k": 2}}),
        (
            {"speculation": {"max_k": 1}, "vllm_xargs": {"session_id": "a"}},
            {"vllm_xargs": {"session_id": "a", "aerie_max_k": 1}},
        ),
    ],
)
def test_a_limit_is_carried_to_the_engine(given: dict[str, Any], carried: dict[str, Any]) -> None:
    take_limit(given)
    assert given == carried


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"speculation": 5}, "speculation"),
        ({"speculation": []}, "speculation"),
        ({"speculation": {"k": 5}}, "speculation.k"),
        ({"speculation": {"max_k": -1}}, "speculation.max_k"),
        ({"speculation": {"max_k": "5"}}, "speculation.max_k"),
        ({"speculation": {"max_k": 2.0}}, "speculation.max_k"),
        ({"speculation": {"max_k": True}}, "speculation.max_k"),
        ({"speculation": {"enabled": 0}}, "speculation.enabled"),
        ({"speculation": {"enabled": False, "max_k": -1}}, "speculation.max_k"),
        ({"vllm_xargs": {"aerie_max_k": "many"}}, "vllm_xargs.aerie_max_k"),
        ({"vllm_xargs": {"aerie_max_k": [3]}}, "vllm_xargs.aerie_max_k"),
        ({"speculation": {"max_k": 1}, "vllm_xargs": {"aerie_max_k": 1}}, "speculation"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(given: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        take_limit(given)
    assert (caught.value.status, caught.value.param) == (400, param)
