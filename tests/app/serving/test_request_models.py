"""The request models: what they take is vLLM's, and how much a refusal costs is not."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from vllm.config import ModelConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from app.serving.request_models import (
    ChatRequest,
    ItemsRequest,
    TextRequest,
    TokenizeMessagesRequest,
    TokenizeTextRequest,
)

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
