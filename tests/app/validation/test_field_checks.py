"""Refusals that vLLM's own models do not make, with the field that OpenAI would name."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.sampling_params import StructuredOutputsParams

from app.endpoints import declared
from app.errors import ApiError
from app.serving.request_models import ChatRequest, TextRequest
from app.settings import LimitSettings
from app.validation import field_checks
from app.validation.fields import check_beam_search

USER = {"role": "user", "content": "hi"}
RULES = {endpoint.name: endpoint.fields for endpoint in declared()}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("max_tokens", value) for value in ("5", True, 5.5, [5], {"a": 5})),
        # vLLM's model writes the bounds of these into their type.
        *(
            (field, value)
            for field in ("truncate_prompt_tokens", "stream_interval")
            for value in ("5", True)
        ),
        *(
            (field, value)
            for field in ("temperature", "top_p", "presence_penalty")
            for value in ("0.5", True, [0.5])
        ),
    ],
)
def test_a_number_must_be_a_number(field: str, value: Any) -> None:
    with pytest.raises(ApiError) as caught:
        field_checks.check_scalars({field: value}, ChatRequest)
    assert caught.value.param == field


def test_numbers_nulls_and_whole_floats_pass() -> None:
    field_checks.check_scalars(
        {"temperature": 1, "max_tokens": None, "n": 2, "stream": True}, ChatRequest
    )


@pytest.mark.parametrize(
    ("model", "field", "value"),
    [
        (ResponsesRequest, "tools", 7),
        (ResponsesRequest, "tools", {}),
        (ChatRequest, "logit_bias", [1]),
        (ChatRequest, "messages", "hi"),
        (TextRequest, "logit_bias", 5),
    ],
)
def test_a_list_must_be_a_list_and_an_object_an_object(model: Any, field: str, value: Any) -> None:
    """The models of vLLM take the length of some before they know what it is."""
    with pytest.raises(ApiError) as caught:
        field_checks.check_containers({field: value}, model)
    assert (caught.value.status, caught.value.param) == (400, field)


def test_containers_nulls_and_fields_of_several_kinds_pass() -> None:
    field_checks.check_containers({"prompt": "a", "stop": "a", "logit_bias": None}, TextRequest)
    field_checks.check_containers(
        {"prompt": ["a"], "stop": ["a"], "logit_bias": {"5": 1}}, TextRequest
    )
    field_checks.check_containers({"input": "a", "tools": []}, ResponsesRequest)


def test_unknown_fields_are_refused_by_name() -> None:
    with pytest.raises(ApiError, match="tempurature") as caught:
        field_checks.check_fields({"tempurature": 1}, ChatRequest, RULES["chat"])
    assert caught.value.param == "tempurature"


def test_fields_without_effect_are_dropped_and_checked() -> None:
    payload = {"store": True, "metadata": {"a": "b"}, "temperature": 1}
    field_checks.check_fields(payload, ChatRequest, RULES["chat"])
    assert payload == {"temperature": 1}
    with pytest.raises(ApiError) as caught:
        field_checks.check_fields({"metadata": 5}, ChatRequest, RULES["chat"])
    assert caught.value.param == "metadata"


@pytest.mark.parametrize(
    ("api", "model", "field", "harmless", "refused"),
    [
        ("completions", TextRequest, "best_of", 1, 2),
        ("completions", TextRequest, "suffix", "", "end"),
        ("completions", TextRequest, "priority", 0, 5),
        ("completions", TextRequest, "request_id", "", "mine"),
        ("completions", TextRequest, "logprob_token_ids", [], [5]),
        ("chat", ChatRequest, "logprob_token_ids", [], [5]),
        ("responses", ResponsesRequest, "previous_input_messages", [], [{"role": "user"}]),
    ],
)
def test_what_cannot_be_honoured_is_refused_not_ignored(
    api: str, model: Any, field: str, harmless: Any, refused: Any
) -> None:
    field_checks.check_fields({field: harmless}, model, RULES[api])
    with pytest.raises(ApiError) as caught:
        field_checks.check_fields({field: refused}, model, RULES[api])
    assert (caught.value.param, caught.value.code) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("payload", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"stop": "a" * 2000}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True}, "max_tokens"),
        ({"logit_bias": {"7": 101}}, "logit_bias.7"),
        ({"logit_bias": {"7": 0, "8": -100.5}}, "logit_bias.8"),
        ({"seed": 2**63 - 1, "n": 2}, "seed"),
        (
            {"repetition_detection": {"max_pattern_size": 257, "min_count": 2}},
            "repetition_detection.max_pattern_size",
        ),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"structured_outputs": "a"}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        *(
            ({"structured_outputs": {"json_object": True, option: value}},
                f"structured_outputs.{option}")
            for option, value in (
                ("disable_any_whitespace", True), ("disable_any_whitespace", 0),
                ("disable_additional_properties", True), ("whitespace_pattern", " "),
                ("whitespace_pattern", ""),
            )
        ),
    ],
)  # fmt: skip
def test_bounds(payload: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        field_checks.check_generation(payload, LimitSettings())
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_a_limit_beyond_the_models_context_is_named(name: str) -> None:
    field_checks.check_generation({name: 512}, LimitSettings(), context=512)
    with pytest.raises(ApiError, match=r"513.*512") as caught:
        field_checks.check_generation({name: 513}, LimitSettings(), context=512)
    assert (caught.value.param, caught.value.code) == (name, "invalid_value")


def test_every_option_beside_a_constraint_is_known() -> None:
    """Catches: an option of a later vLLM, which might be taken and ignored."""
    names = {each.name for each in fields(StructuredOutputsParams) if each.init}
    assert names == {*field_checks.CONSTRAINTS, *field_checks._OPTIONS}


def test_many_greedy_choices_are_allowed() -> None:
    request = ChatRequest.model_validate({"messages": [USER], "n": 3, "temperature": 0})
    params = request.to_sampling_params(16, {})
    assert (params.n, params.temperature, request.n) == (3, 0.0, 3)


@pytest.mark.parametrize(
    "payload",
    [
        {"top_logprobs": 20, "logprobs": True},
        {"top_logprobs": 0, "logprobs": 20},
        {"seed": 2**63 - 1, "n": 1},
        {"seed": 2**63 - 1},
        {"repetition_detection": {"max_pattern_size": 256, "min_count": 2}},
        {"structured_outputs": {"regex": "", "choice": None, "whitespace_pattern": None}},
        {"structured_outputs": {"json_object": True, "disable_any_whitespace": False}},
        {"structured_outputs": {"json_object": True, "disable_additional_properties": False}},
    ],
)
def test_what_is_within_bounds_passes(payload: dict[str, Any]) -> None:
    field_checks.check_generation(payload, LimitSettings(), scores_prompts=True)


@pytest.mark.parametrize("penalty", [math.inf, -math.inf, math.nan, 10.1, -11])
def test_a_length_penalty_of_a_beam_search_is_bounded(penalty: float) -> None:
    with pytest.raises(ApiError) as caught:
        check_beam_search({"use_beam_search": True, "length_penalty": penalty})
    assert (caught.value.status, caught.value.param) == (400, "length_penalty")
    check_beam_search({"use_beam_search": True, "length_penalty": None})


def test_an_echo_alone_needs_no_output() -> None:
    field_checks.check_generation(
        {"max_tokens": 0, "echo": True}, LimitSettings(), scores_prompts=True
    )
    with pytest.raises(ApiError):
        field_checks.check_generation(
            {"max_tokens": 0, "echo": False}, LimitSettings(), scores_prompts=True
        )
    request = TextRequest.model_validate({"prompt": "a", "max_tokens": 0, "echo": True})
    assert request.to_sampling_params(16, {}).max_tokens == 0
    spoken = TextRequest.model_validate({"prompt": "a", "max_tokens": 3, "echo": True})
    assert spoken.to_sampling_params(3, {}).max_tokens == 3


@pytest.mark.parametrize("prompt", [[10], [1, 10], [-1], [[1], [10]], [[1], [2, -1]]])
def test_tokens_outside_of_the_vocabulary(prompt: Any) -> None:
    with pytest.raises(ApiError) as caught:
        field_checks.check_token_ids({"prompt": prompt}, "prompt", vocabulary=10)
    assert (caught.value.status, caught.value.param) == (400, "prompt")


@pytest.mark.parametrize("prompt", [[0, 9], [[0], [9]], ["text"], "text", [], [1.5], None])
def test_tokens_and_what_is_no_token_pass(prompt: Any) -> None:
    field_checks.check_token_ids({"prompt": prompt}, "prompt", vocabulary=10)


def test_more_token_ids_than_the_context_holds() -> None:
    field_checks.check_token_count([1] * 10, "tokens", 10)
    with pytest.raises(ApiError) as caught:
        field_checks.check_token_count([1] * 11, "tokens", 10)
    assert (caught.value.param, caught.value.code) == ("tokens", "context_length_exceeded")
