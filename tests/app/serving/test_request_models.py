"""The request models: what they take is vLLM's, and how much a refusal costs is not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from vllm.config import ModelConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from app.endpoints import declared
from app.errors import ApiError
from app.serving.request_models import (
    ChatRequest,
    ItemsRequest,
    TextRequest,
    TokenizeMessagesRequest,
    TokenizeTextRequest,
)
from app.settings import LimitSettings
from app.validation.size_limits import check_choices
from tests.app.scripted_engine import Client

USER = {"role": "user", "content": "a"}
MODELS = [
    (ChatRequest, ChatCompletionRequest, "messages", {**USER, "name": 5}),
    (TextRequest, CompletionRequest, "prompt", {}),
    (ItemsRequest, ResponsesRequest, "input", {"type": "message"}),
]


def errors(model: type[BaseModel], payload: dict[str, Any]) -> list[Any]:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(payload)
    return [(error["loc"], error["msg"]) for error in caught.value.errors()]


@pytest.mark.parametrize(("model", "stock", "name", "bad"), MODELS)
def test_a_thousand_bad_entries_are_one_error(
    model: type[BaseModel], stock: type[BaseModel], name: str, bad: Any
) -> None:
    """The one that vLLM's own model has first: a request's answer stays the same."""
    few = errors(model, {name: [bad] * 1000})
    assert len(few) == len(errors(model, {name: [bad]}))
    assert few[0] == errors(stock, {name: [bad] * 2})[0]


@pytest.mark.parametrize(("model", "stock", "name", "bad"), MODELS)
def test_what_is_taken_is_vllms(
    model: type[BaseModel], stock: type[BaseModel], name: str, bad: Any
) -> None:
    mine, theirs = model.model_json_schema(), stock.model_json_schema()
    assert mine["properties"] == theirs["properties"]
    assert mine.get("required") == theirs.get("required")


@pytest.mark.parametrize(
    "request_",
    [TokenizeTextRequest(prompt="a"), TokenizeMessagesRequest(messages=[USER])],
    ids=["prompt", "messages"],
)
def test_a_text_to_tokenize_must_fit_into_the_context(request_: Any) -> None:
    config = ModelConfig.__new__(ModelConfig)
    config.max_model_len = 100
    params = request_.build_tok_params(config)
    assert (params.max_total_tokens, params.max_output_tokens) == (100, 0)


def test_every_field_that_asks_for_sequences_is_declared() -> None:
    """A field that is not would make sequences without slots, and one too many slots without
    sequences."""
    for endpoint in declared():
        if endpoint.generates:
            models = endpoint.models()
            names = {name for model in models for name in model.model_fields} - {*endpoint.fields}
            assert set(endpoint.sequence_fields) == names & {"n", "prompt"}, endpoint.name


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("chat", {"messages": [USER], "n": 129}),
        ("chat", {"messages": [USER], "n": 0}),
        ("completions", {"prompt": "a", "n": 10**9}),
        ("completions", {"prompt": ["a", "b"], "n": 65}),
        ("completions", {"prompt": ["a"] * 129, "n": 10**9}),
        ("completions", {"prompt": [[1]] * 129}),
    ],
)
def test_too_many_choices_are_refused_in_the_same_words_before_and_after_admission(
    name: str, body: dict[str, Any]
) -> None:
    with pytest.raises(ApiError) as before:
        check_choices(body, LimitSettings())
    with pytest.raises(ApiError) as after:
        asyncio.run(Client().answer(name, body))
    first, second = before.value, after.value
    assert (first.status, first.envelope()) == (400, second.envelope())
