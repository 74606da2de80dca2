"""The field `speculation` is honoured or refused."""

from __future__ import annotations

from typing import Any

import pytest

from app.endpoints import declared
from app.errors import ApiError
from app.validation.speculation_field import take_options


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
        ({"speculation": {"tokens": False}}, {}),
        ({"speculation": {"tokens": True}}, {"vllm_xargs": {"aerie_report_tokens": 1}}),
        (
            {"speculation": {"tokens": True, "max_k": 2}, "vllm_xargs": {"session_id": "a"}},
            {"vllm_xargs": {"session_id": "a", "aerie_max_k": 2, "aerie_report_tokens": 1}},
        ),
        (
            {"speculation": {"max_k": 1}, "vllm_xargs": {"session_id": "a"}},
            {"vllm_xargs": {"session_id": "a", "aerie_max_k": 1}},
        ),
    ],
)
def test_a_limit_is_carried_to_the_engine(given: dict[str, Any], carried: dict[str, Any]) -> None:
    take_options(given)
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
        ({"speculation": {"tokens": 1}}, "speculation.tokens"),
        ({"speculation": {"tokens": True}, "echo": True}, "speculation.tokens"),
        ({"speculation": {"tokens": True}, "include_reasoning": False}, "speculation.tokens"),
        ({"vllm_xargs": {"aerie_report_tokens": 1}}, "vllm_xargs.aerie_report_tokens"),
        ({"vllm_xargs": {"aerie_report_steps": 0}}, "vllm_xargs.aerie_report_steps"),
        ({"speculation": {"enabled": False, "max_k": -1}}, "speculation.max_k"),
        ({"vllm_xargs": {"aerie_max_k": "many"}}, "vllm_xargs.aerie_max_k"),
        ({"vllm_xargs": {"aerie_max_k": [3]}}, "vllm_xargs.aerie_max_k"),
        ({"speculation": {"max_k": 1}, "vllm_xargs": {"aerie_max_k": 1}}, "speculation"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(given: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        take_options(given)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("name", "told"), [("responses", True), ("messages", True), ("chat", False)]
)
def test_tokens_are_told_where_that_is_exact_and_refused_elsewhere(name: str, told: bool) -> None:
    [endpoint] = [each for each in declared() if each.name == name]
    with pytest.raises(ApiError) as caught:
        take_options(
            {"speculation": {"tokens": True}},
            reports_token_origins=endpoint.reports_token_origins,
            server_reports=told,
        )
    assert (caught.value.status, caught.value.param) == (400, "speculation.tokens")
    assert caught.value.code == "unsupported_parameter"
