"""Bounds on a live gateway: each refusal names its field, and the engine never sees the request."""

from __future__ import annotations

import json
import time

import httpx
import pytest

from .gateway import MODEL
from .wire import JSON, assert_error, assert_names

CHAT: JSON = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEMPLATE = "{{ 1 }}"


def wide(properties: int) -> JSON:
    return {
        "type": "object",
        "properties": {f"p{i}": {"type": "string"} for i in range(properties)},
    }


def deep(levels: int) -> JSON:
    schema: JSON = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def schema_format(schema: JSON) -> JSON:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    }


def tool(parameters: JSON) -> JSON:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"chat_template": TEMPLATE}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": TEMPLATE}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"max_length": 10**9}}, "chat_template_kwargs"),
        ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
        ({"bad_words": ["a"] * 2000}, "bad_words"),
        ({"stop_token_ids": [1] * 2000}, "stop_token_ids"),
        ({"tools": [tool({})] * 200}, "tools"),
        ({"tools": [tool(deep(40))]}, "tools"),
        ({"messages": CHAT["messages"] * 5000}, "messages"),
        (schema_format(deep(300)), "response_format"),
        (schema_format(wide(1500)), "response_format"),
        ({"structured_outputs": {"json": json.dumps(deep(300))}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a" * 5000}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": f'root ::= "{"a" * 70_000}"'}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["abcdefgh" * 16] * 600}}, "structured_outputs"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
def test_too_much_is_refused_by_name(
    http: httpx.Client, changes: JSON, field: str, streaming: bool
) -> None:
    started = time.monotonic()
    response = http.post("/v1/chat/completions", json={**CHAT, **changes, "stream": streaming})
    assert_names(assert_error(response, 400), field)
    assert time.monotonic() - started < 10, "it was worked on before it was refused"


def test_prompts_times_choices(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": ["a"] * 100, "n": 2, "max_tokens": 1}
    assert_names(assert_error(http.post("/v1/completions", json=body), 400), "n")
    body = {"model": MODEL, "prompt": ["a"] * 200, "max_tokens": 1}
    assert_names(assert_error(http.post("/v1/completions", json=body), 400), "prompt")


def test_a_schema_within_the_bounds_is_honoured(http: httpx.Client) -> None:
    response = http.post("/v1/chat/completions", json={**CHAT, **schema_format(wide(100))})
    assert response.status_code == 200, response.text
