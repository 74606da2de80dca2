"""POST /v1/responses/input_tokens: the tokens that the same request would be answered for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient

from tests.app.fake_engine import CONTEXT
from tests.app.keys_file import tenant

Gateway = Callable[..., TestClient]
RESPONSES = "/v1/responses"
PATH = f"{RESPONSES}/input_tokens"
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FUNCTION = {"type": "function", "name": "f", "parameters": SCHEMA}
CUSTOM = {"type": "custom", "name": "run", "description": "Runs a line of code."}
NAMESPACE = {"type": "namespace", "name": "mine", "description": "x", "tools": [FUNCTION]}
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"n": 1}'}
RESULT = {"type": "function_call_output", "call_id": "a", "output": "two"}
FORMAT = {"type": "json_schema", "name": "x", "schema": SCHEMA}
BODIES: dict[str, dict[str, Any]] = {
    "text": {"input": "hi"},
    "items": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi you"}]}]},
    "call": {"input": [{"role": "user", "content": "hi"}, CALL, RESULT], "tools": [FUNCTION]},
    "instructions": {"input": "hi", "instructions": "Answer in one word."},
    "function": {"input": "hi", "tools": [FUNCTION], "parallel_tool_calls": False},
    "custom": {"input": "hi", "tools": [CUSTOM, NAMESPACE]},
    "no call": {"input": "hi", "tools": [FUNCTION], "tool_choice": "none"},
    "forced call": {"input": "hi", "tools": [FUNCTION], "tool_choice": "required"},
    "format": {"input": "hi", "text": {"format": FORMAT}},
    "reasoning": {"input": "hi", "reasoning": {"effort": "low", "summary": "auto"}},
    "cut": {"input": "hi " * CONTEXT, "truncation": "auto"},
    "cut for an answer": {"input": "a " * CONTEXT, "truncation": "auto", "max_output_tokens": 100},
    "of a response": {
        "input": "hi",
        "max_output_tokens": 9,
        "stream": False,
        "store": True,
        "temperature": 0.5,
        "include": [],
        "speculation": {"max_k": 1},
    },
    "sampled": {
        "input": "hi",
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "seed": 7,
        "presence_penalty": 1,
        "frequency_penalty": 1,
        "repetition_penalty": 1.1,
        "stop": ["x"],
        "top_logprobs": 2,
        "parallel_tool_calls": True,
        "ignore_eos": True,
    },
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "input"),
    ({"input": None, "instructions": "Be brief."}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": "a " * CONTEXT}, "input"),
    ({"input": "hi", "conversation": "conv_1"}, "conversation"),
    ({"input": "hi", "temperature": -1}, "temperature"),
    ({"input": "hi", "top_k": -5}, "top_k"),
    ({"input": "hi", "personality": "friendly"}, "personality"),
    ({"input": "hi", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"input": "hi", "chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
]


@pytest.fixture
def client(gateway: Gateway) -> TestClient:
    return gateway(tool_call_parser="hermes")


def counted(client: TestClient, **body: Any) -> int:
    response = client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer == {"object": "response.input_tokens", "input_tokens": answer["input_tokens"]}
    tokens: int = answer["input_tokens"]
    return tokens


def reported(client: TestClient, **body: Any) -> int:
    response = client.post(RESPONSES, json=body)
    assert response.status_code == 200, response.text
    tokens: int = response.json()["usage"]["input_tokens"]
    return tokens


@pytest.mark.parametrize("kind", BODIES)
def test_the_count_is_what_a_response_reports(client: TestClient, kind: str) -> None:
    tokens = counted(client, **BODIES[kind])
    assert tokens == reported(client, **BODIES[kind])
    if kind in ("items", "call", "instructions", "function", "custom", "cut"):
        assert tokens > counted(client, input="hi"), "it is not in the prompt"


def test_earlier_turns_are_counted(client: TestClient) -> None:
    """Catches: a count of the new turn alone."""
    first = client.post(RESPONSES, json={"input": "one two three"}).json()
    follow = {"input": "four", "previous_response_id": first["id"]}
    said = {"type": "item_reference", "id": first["output"][0]["id"]}
    for body in (follow, {"input": [said, {"role": "user", "content": "four"}]}):
        assert counted(client, **body) == reported(client, **body)
    assert counted(client, **follow) > counted(client, input="one two three")


def test_nothing_is_generated_and_nothing_kept(client: TestClient) -> None:
    client.app.state.engine.llm.sampling = None  # type: ignore[attr-defined]
    before = client.app.state.responses.size  # type: ignore[attr-defined]
    response = client.post(PATH, json={"input": "hi", "store": True, "stream": True})
    assert response.json()["object"] == "response.input_tokens"
    assert client.app.state.engine.llm.sampling is None  # type: ignore[attr-defined]
    assert client.app.state.responses.size == before  # type: ignore[attr-defined]
    for method in ("GET", "DELETE"):
        assert client.request(method, PATH).status_code == 404, "a response has this id"


def test_openai_s_client(client: TestClient) -> None:
    http: Any = client
    api = openai.OpenAI(base_url="http://testserver/v1", api_key="x", http_client=http)
    given: Any = {"input": "hi", "tools": [FUNCTION], "text": {"format": FORMAT}}
    answer = api.responses.input_tokens.count(model="fake", **given)
    assert answer.object == "response.input_tokens"
    assert answer.input_tokens == counted(client, **given)
    with pytest.raises(openai.NotFoundError):
        api.responses.input_tokens.count(model="other", input="hi")
    with pytest.raises(openai.BadRequestError, match="Missing required parameter: 'input'"):
        api.responses.input_tokens.count(model="fake")


@pytest.mark.parametrize(("body", "param"), REFUSED)
def test_a_refusal_is_that_of_a_response(
    client: TestClient, body: dict[str, Any], param: str
) -> None:
    count, response = client.post(PATH, json=body), client.post(RESPONSES, json=body)
    assert (count.status_code, count.json()) == (400, response.json())
    assert count.json()["error"]["param"] == param


def test_tools_that_a_response_may_not_have_are_not_counted(gateway: Gateway) -> None:
    """Without a parser for calls."""
    for path in (PATH, RESPONSES):
        refused = gateway().post(path, json=BODIES["function"])
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")


def test_another_tenant_s_response_is_not_counted(gateway: Gateway) -> None:
    keys = tenant("one", "sk-aerie-one") + tenant("two", "sk-aerie-two")
    client = gateway(keys=keys)
    owner, other = ({"authorization": f"Bearer sk-aerie-{name}"} for name in ("one", "two"))
    made = client.post(RESPONSES, json={"input": "a secret"}, headers=owner).json()
    body = {"input": "hi", "previous_response_id": made["id"]}
    assert client.post(PATH, json=body, headers=owner).status_code == 200
    unknown = {"input": "hi", "previous_response_id": "resp_none"}
    for refused in (
        client.post(PATH, json=body, headers=other),
        client.post(PATH, json=unknown, headers=owner),
    ):
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "previous_response_not_found")
    assert client.post(PATH, json=body).status_code == 401


def test_the_tenant_is_charged_for_what_was_counted(gateway: Gateway) -> None:
    """Not for what the body was estimated to hold."""
    limited = tenant("one", "sk-aerie-one", "tokens_per_minute = 1000")
    client = gateway(keys=limited)
    headers = {"authorization": "Bearer sk-aerie-one"}
    body = {"input": "a" * 2000}
    tokens = client.post(PATH, json=body, headers=headers).json()["input_tokens"]
    again = client.post(PATH, json={"input": "a"}, headers=headers)
    left = int(again.headers["x-ratelimit-remaining-tokens"])
    assert abs(1000 - tokens - left) < 50, (tokens, left)
