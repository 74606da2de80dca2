"""What clients of each dialect send, through the checks and vLLM's serving classes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, get_args

import pytest
from fastapi.testclient import TestClient
from openai.types.responses import ResponseIncludable
from openai.types.responses.service_tier import ServiceTier

from tests.app.fake_engine import CONTEXT

Gateway = Callable[..., TestClient]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
USER = {"role": "user", "content": "hi"}
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
VALID: dict[str, dict[str, Any]] = {
    "chat": {"model": "fake", "messages": [USER], "max_tokens": 4},
    "completions": {"model": "fake", "prompt": "hi", "max_tokens": 4},
    "responses": {"model": "fake", "input": "hi", "max_output_tokens": 4},
    "messages": {"model": "fake", "messages": [USER], "max_tokens": 4},
}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "chat": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
    "responses": [{"type": "function", "name": "f", "parameters": SCHEMA}],
    "messages": [{"name": "f", "input_schema": SCHEMA}],
}
STRICT_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "strict": True,
            "parameters": {**SCHEMA, "additionalProperties": False},
        },
    }
]
TOOL_ANSWER = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'
STREAMING = pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
DIALECTS = pytest.mark.parametrize("dialect", sorted(PATHS))
WITH_TOOLS = pytest.mark.parametrize("dialect", sorted(TOOLS))


def send(client: TestClient, dialect: str, streaming: bool = False, **changes: Any) -> Any:
    """The response to a valid body with changes, read to its end."""
    return client.post(PATHS[dialect], json={**VALID[dialect], **changes, "stream": streaming})


def refusal(response: Any, dialect: str) -> tuple[str, str | None]:
    """Message and `param` of a 400; Anthropic's envelope has no `param`."""
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["message"], error.get("param") if dialect != "messages" else None


CHOICES: dict[str, list[Any]] = {
    "chat": [None, "auto", "required", {"type": "function", "function": {"name": "f"}}],
    "responses": [None, "auto", "required", {"type": "function", "name": "f"}],
    "messages": [None, {"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}],
}


@STREAMING
@pytest.mark.parametrize("choice", range(4))
@WITH_TOOLS
def test_tools_need_a_parser(gateway: Gateway, dialect: str, choice: int, streaming: bool) -> None:
    given = {"tools": TOOLS[dialect], "tool_choice": CHOICES[dialect][choice]}
    message, param = refusal(send(gateway(), dialect, streaming, **given), dialect)
    assert "--tool-call-parser" in message
    assert param in ("tool_choice", None)
    assert send(gateway(tool_call_parser="hermes"), dialect, streaming, **given).is_success


@WITH_TOOLS
def test_tools_that_may_not_be_called_need_no_parser(gateway: Gateway, dialect: str) -> None:
    choice = {"type": "none"} if dialect == "messages" else "none"
    assert send(gateway(), dialect, tools=TOOLS[dialect], tool_choice=choice).is_success


@pytest.mark.parametrize(
    "settings", [{}, {"tool_call_parser": "hermes"}, {"reasoning_parser": "qwen3"}], ids=str
)
def test_tools_are_counted(gateway: Gateway, settings: dict[str, str]) -> None:
    client, path = gateway(**settings), "/v1/messages/count_tokens"
    body = {"model": "fake", "messages": [USER]}
    plain = client.post(path, json=body).json()["input_tokens"]
    counted = client.post(path, json={**body, "tools": TOOLS["messages"]})
    assert counted.status_code == 200, counted.text
    assert counted.json()["input_tokens"] >= plain


LIMITS = [
    ("chat", "max_tokens"),
    ("chat", "max_completion_tokens"),
    ("completions", "max_tokens"),
    ("completions", "max_completion_tokens"),
    ("responses", "max_output_tokens"),
    ("messages", "max_tokens"),
]


@STREAMING
@pytest.mark.parametrize(("dialect", "field"), LIMITS)
def test_a_limit_beyond_the_context_is_named(
    gateway: Gateway, dialect: str, field: str, streaming: bool
) -> None:
    response = send(gateway(), dialect, streaming, **{field: 100_000})
    message, param = refusal(response, dialect)
    assert param in (field, None)
    assert field in message
    assert str(CONTEXT) in message
    assert "context_length_exceeded" not in response.text


@STREAMING
@pytest.mark.parametrize("dialect", ["chat", "completions"])
def test_an_error_about_the_limit_has_the_name_with_which_it_was_sent(
    gateway: Gateway, dialect: str, streaming: bool
) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        body = {key: value for key, value in VALID[dialect].items() if key != "max_tokens"}
        body |= {name: 4, "min_tokens": 8, "stream": streaming}
        message, param = refusal(gateway().post(PATHS[dialect], json=body), dialect)
        assert param == "min_tokens"
        assert f"{name}=4" in message


@STREAMING
@pytest.mark.parametrize(
    ("dialect", "field"),
    [("chat", "messages"), ("completions", "prompt"), ("responses", "input")],
)
def test_a_prompt_beyond_the_context_is_named(
    gateway: Gateway, dialect: str, field: str, streaming: bool
) -> None:
    text = "word " * CONTEXT * 4
    value = [{"role": "user", "content": text}] if field == "messages" else text
    response = send(gateway(), dialect, streaming, **{field: value})
    assert refusal(response, dialect)[1] == field
    assert response.json()["error"]["code"] == "context_length_exceeded"


CACHED_PART = {"text": "hi", "prompt_cache_breakpoint": {"mode": "explicit"}}
NO_EFFECT = [
    ("chat", "messages", [{"role": "user", "content": [{**CACHED_PART, "type": "text"}]}]),
    ("responses", "input", [{"role": "user", "content": [{**CACHED_PART, "type": "input_text"}]}]),
    ("chat", "verbosity", "low"),
    ("chat", "stream_options", {"include_obfuscation": False}),
    ("completions", "safety_identifier", "u"),
    ("responses", "safety_identifier", "u"),
    ("responses", "stream_options", {"include_obfuscation": False}),
    ("responses", "client_metadata", {"a": "b"}),
    ("responses", "prompt_cache_retention", "24h"),
    ("chat", "prompt_cache_options", {"mode": "explicit"}),
    ("responses", "prompt_cache_options", {"mode": "explicit"}),
    ("responses", "context_management", [{"type": "compaction"}]),
    ("messages", "service_tier", "auto"),
    ("messages", "speed", "standard"),
    ("messages", "diagnostics", {"previous_message_id": "msg_1"}),
    ("messages", "user_profile_id", "u"),
    ("messages", "output_config", {"task_budget": {"type": "tokens", "total": 1000}}),
    ("messages", "context_management", {"edits": []}),
    ("messages", "cache_control", {"type": "ephemeral"}),
    ("messages", "metadata", {"user_id": "u"}),
]


TIERS, INCLUDABLE = get_args(get_args(ServiceTier)[0]), get_args(ResponseIncludable)


@pytest.mark.parametrize(
    ("field", "value"),
    [*(("service_tier", tier) for tier in TIERS), *(("include", [what]) for what in INCLUDABLE)],
)
def test_every_value_of_openais_schema_is_taken(gateway: Gateway, field: str, value: Any) -> None:
    response = send(gateway(), "responses", **{field: value})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(("dialect", "field", "value"), NO_EFFECT)
def test_fields_without_effect_are_accepted(
    gateway: Gateway, dialect: str, field: str, value: Any
) -> None:
    response = send(gateway(), dialect, streaming=True, **{field: value})
    assert response.status_code == 200, response.text


def test_chats_name_of_the_limit_counts_in_completions(gateway: Gateway) -> None:
    """GuideLLM's first request."""
    body = {
        "model": "fake",
        "prompt": "Test connection",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stop": None,
        "ignore_eos": True,
    }
    response = gateway().post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    both = send(gateway(), "completions", max_tokens=4, max_completion_tokens=2).json()
    assert both["usage"]["completion_tokens"] == 2
    message, param = refusal(send(gateway(), "completions", max_completion_tokens="2"), "")
    assert param == "max_completion_tokens", message


@STREAMING
@pytest.mark.parametrize(
    ("dialect", "tool", "name"),
    [
        ("responses", {"type": "web_search"}, "web_search"),
        ("responses", {"type": "local_shell"}, "local_shell"),
        (
            "responses",
            {"type": "mcp", "server_label": "x", "server_url": "http://x"},
            "mcp",
        ),
        (
            "responses",
            {"type": "code_interpreter", "container": {"type": "auto"}},
            "code_interpreter",
        ),
        ("messages", {"type": "web_search_20250305", "name": "web_search"}, "web_search_20250305"),
        ("messages", {"type": "bash_20250124", "name": "bash"}, "bash_20250124"),
        ("chat", {"type": "custom", "custom": {"name": "x"}}, "custom"),
    ],
)
def test_tools_that_do_not_exist_here(
    gateway: Gateway, dialect: str, tool: dict[str, Any], name: str, streaming: bool
) -> None:
    tools = [*TOOLS[dialect], tool]
    refused = send(gateway(tool_call_parser="hermes"), dialect, streaming, tools=tools)
    message, param = refusal(refused, dialect)
    assert name in message
    assert param in ("tools[1].type", None)
    lenient = gateway(tool_call_parser="hermes", unknown_tools="ignore")
    for given in (tools, [tool]):
        response = send(lenient, dialect, streaming, tools=given)
        assert response.status_code == 200, response.text
        assert name not in response.text


def test_a_choice_of_a_tool_that_does_not_exist_here(gateway: Gateway) -> None:
    given = {"tools": TOOLS["responses"], "tool_choice": {"type": "web_search_preview"}}
    message, param = refusal(
        send(gateway(tool_call_parser="hermes"), "responses", **given), "responses"
    )
    assert param == "tool_choice.type"
    assert "web_search_preview" in message
    lenient = gateway(tool_call_parser="hermes", unknown_tools="ignore")
    assert send(lenient, "responses", **given).is_success


def allowed(dialect: str, mode: Any, *tools: Any) -> dict[str, Any]:
    """A `tool_choice` that allows some of the tools."""
    given = {"mode": mode, "tools": list(tools)}
    if dialect == "chat":
        return {"type": "allowed_tools", "allowed_tools": given}
    return {"type": "allowed_tools", **given}


def named(dialect: str, name: str) -> dict[str, Any]:
    """A function as a `tool_choice` names it."""
    if dialect == "chat":
        return {"type": "function", "function": {"name": name}}
    return {"type": "function", "name": name}


def two_tools(dialect: str) -> list[dict[str, Any]]:
    (tool,) = TOOLS[dialect]
    if dialect == "chat":
        return [tool, {**tool, "function": {**tool["function"], "name": "g"}}]
    return [tool, {**tool, "name": "g"}]


@STREAMING
@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_allowed_tools_are_those_of_the_request(
    gateway: Gateway, dialect: str, mode: str, streaming: bool
) -> None:
    client, tools = gateway(tool_call_parser="hermes"), two_tools(dialect)
    llm = client.app.state.engine.llm  # type: ignore[attr-defined]
    constraints = []
    for given in (
        {"tools": tools[1:], "tool_choice": mode},
        {"tools": tools, "tool_choice": allowed(dialect, mode, named(dialect, "g"))},
    ):
        response = send(client, dialect, streaming, **given)
        assert response.status_code == 200, response.text
        constraints.append(str(llm.sampling.structured_outputs))
    assert constraints[0] == constraints[1]
    refused = gateway()
    message, _ = refusal(send(refused, dialect, streaming, **given), dialect)
    assert "--tool-call-parser" in message


@pytest.mark.parametrize(
    ("mode", "names", "place"),
    [
        ("auto", [("function", "f"), ("function", "h")], "tools[1]"),
        ("auto", [("custom", "f")], "tools[0]"),
        ("auto", [("web_search", None)], "tools[0]"),
        ("auto", [], "tools"),
        ("none", [("function", "f")], "mode"),
        (["auto"], [("function", "f")], "mode"),
    ],
)
@pytest.mark.parametrize("dialect", ["chat", "responses"])
def test_allowed_tools_must_be_among_the_tools(
    gateway: Gateway, dialect: str, mode: Any, names: Any, place: str
) -> None:
    choice = allowed(dialect, mode, *({**named(dialect, x), "type": kind} for kind, x in names))
    client = gateway(tool_call_parser="hermes")
    response = send(client, dialect, tools=two_tools(dialect), tool_choice=choice)
    inside = "tool_choice.allowed_tools" if dialect == "chat" else "tool_choice"
    message, param = refusal(response, dialect)
    assert param == f"{inside}.{place}"
    assert f"'{param}'" in message


def test_an_allowed_tool_that_does_not_exist_here_can_be_ignored(gateway: Gateway) -> None:
    lenient = gateway(tool_call_parser="hermes", unknown_tools="ignore")
    for others in ([], [named("responses", "f")]):
        choice = allowed("responses", "auto", {"type": "web_search"}, *others)
        response = send(lenient, "responses", tools=two_tools("responses"), tool_choice=choice)
        assert [tool["name"] for tool in response.json()["tools"]] == [
            tool["name"] for tool in others
        ]


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": {"a": 1}}


@pytest.mark.parametrize(
    ("dialect", "changes", "param"),
    [
        (
            "chat",
            {
                "messages": [
                    USER,
                    {"role": "assistant", "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "c", "content": "1"},
                ]
            },
            "messages[1].tool_calls[0].function.arguments",
        ),
        ("responses", {"input": [USER, ITEM]}, "input[1].arguments"),
        (
            "responses",
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
        ),
        (
            "responses",
            {"input": [USER, {"type": "function_call_output", "output": "1"}]},
            "input[1].call_id",
        ),
        ("responses", {"tools": [{"type": "function"}]}, "tools[0].name"),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages[0].content[0].text",
        ),
        ("messages", {"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ],
)
def test_errors_name_the_very_place(
    gateway: Gateway, dialect: str, changes: dict[str, Any], param: str
) -> None:
    response = send(gateway(tool_call_parser="hermes"), dialect, **changes)
    message, named = refusal(response, dialect)
    assert named in (param, None)
    assert f"'{param}'" in message


FOREIGN = [
    ("chat", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("responses", {"background": True}),
    (
        "messages",
        {"max_tokens": 500, "thinking": {"type": "enabled", "budget_tokens": 1024}},
    ),
    ("chat", {"thinking_token_budget": 10}),
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}),
    ("chat", {"mm_processor_kwargs": {"a": 1}}),
    ("chat", {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}),
    ("responses", {"previous_response_id": "resp_1"}),
    ("completions", {"prompt_embeds": "AAAA"}),
    ("chat", {"n": 100_000}),
    ("chat", {"logprobs": True, "logprob_token_ids": list(range(1000))}),
]


@STREAMING
@pytest.mark.parametrize(("dialect", "changes"), FOREIGN, ids=str)
def test_errors_advise_what_this_product_has(
    gateway: Gateway, dialect: str, changes: dict[str, Any], streaming: bool
) -> None:
    from app.settings import section_of

    response = send(gateway(), dialect, streaming, **changes)
    message, _ = refusal(response, dialect)
    options = [word.strip("`'\".,") for word in message.split() if word.startswith("--")]
    assert {word.removeprefix("--").replace("-", "_") for word in options} <= set(section_of())
    assert "VLLM_" not in message
    assert "vllm" not in message.lower()
    assert "None" not in message, "a data structure of Python's"


@pytest.mark.parametrize("dialect", ["responses", "messages"])
@STREAMING
def test_cached_tokens_are_told(gateway: Gateway, dialect: str, streaming: bool) -> None:
    text = send(gateway(), dialect, streaming).text
    name = "cache_read_input_tokens" if dialect == "messages" else "cached_tokens"
    assert f'"{name}":2' in text.replace(": ", ":")


PREFIXES = {"chat": "chatcmpl-", "completions": "cmpl-", "responses": "resp_", "messages": "msg_"}


@STREAMING
@DIALECTS
def test_ids_begin_as_the_api_says(gateway: Gateway, dialect: str, streaming: bool) -> None:
    found = re.search(r'"id": ?"([a-z]+[_-])', send(gateway(), dialect, streaming).text)
    assert found is not None
    assert found[1] == PREFIXES[dialect]


def test_request_ids_where_anthropics_clients_look(gateway: Gateway) -> None:
    for response in (send(gateway(), "messages"), send(gateway(), "messages", max_tokens=0)):
        assert response.headers["request-id"] == response.headers["x-request-id"]
    assert response.json()["request_id"] == response.headers["request-id"]
    assert "request-id" not in send(gateway(), "chat").headers


def test_logprobs_of_responses(gateway: Gateway) -> None:
    body = send(gateway(), "responses", top_logprobs=2).json()
    parts = body["output"][0]["content"]
    assert len(parts[0]["logprobs"]) == 4, json.dumps(body)


def test_an_answer_is_history_for_openais_client(gateway: Gateway) -> None:
    """With every field that the client's own classes add, nulls among them."""
    import openai

    http: Any = gateway(tool_call_parser="hermes", answer=TOOL_ANSWER)
    api = openai.OpenAI(base_url="http://testserver/v1", api_key="x", http_client=http)
    first: Any = api.responses.create(model="fake", input="hi", tools=TOOLS["responses"])  # type: ignore[arg-type]
    calls = [item for item in first.output if item.type == "function_call"]
    assert len(calls) == 1
    result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "1"}
    items: Any = [USER, *(item.model_dump() for item in first.output), result]
    assert api.responses.create(model="fake", input=items).output
    chat: Any = api.chat.completions.parse(model="fake", messages=[USER], tools=STRICT_TOOLS)  # type: ignore[list-item, arg-type]
    message = chat.choices[0].message
    assert message.tool_calls[0].function.name == "f"
    told = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "1"}
    history: Any = [USER, message.model_dump(), told]
    assert api.chat.completions.create(model="fake", messages=history).choices


def test_an_answer_is_history_for_anthropics_client(gateway: Gateway) -> None:
    import anthropic

    http: Any = gateway(tool_call_parser="hermes", answer=TOOL_ANSWER)
    api = anthropic.Anthropic(base_url="http://testserver", api_key="x", http_client=http)
    given: Any = {"model": "fake", "max_tokens": 64, "tools": TOOLS["messages"]}
    first: Any = api.messages.create(messages=[USER], **given)  # type: ignore[list-item]
    calls = [block for block in first.content if block.type == "tool_use"]
    assert [call.name for call in calls] == ["f"]
    result = {"type": "tool_result", "tool_use_id": calls[0].id, "content": "1", "is_error": False}
    history: Any = [
        USER,
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": [result]},
    ]
    assert api.messages.create(messages=history, **given).content


@pytest.mark.parametrize(
    ("choice", "tools", "param"),
    [
        ({"type": "any"}, None, "tool_choice"),
        ({"type": "any"}, [], "tool_choice"),
        ({"type": "tool", "name": "f"}, None, "tool_choice"),
        ({"type": "tool", "name": "g"}, TOOLS["messages"], "tool_choice.name"),
    ],
)
def test_a_forced_call_needs_its_tool(
    gateway: Gateway, choice: Any, tools: Any, param: str
) -> None:
    client = gateway(tool_call_parser="hermes")
    changes = {"tool_choice": choice} if tools is None else {"tool_choice": choice, "tools": tools}
    message, _ = refusal(send(client, "messages", **changes), "messages")
    assert f"'{param}'" in message


@STREAMING
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_no_tool_comes_in_by_way_of_a_message(gateway: Gateway, path: str, streaming: bool) -> None:
    schema = {"type": "object", "properties": {"n": {"multipleOf": 3}}}
    tool = {"name": "f", "strict": True, "input_schema": schema}
    change = {
        "type": "tool_addition",
        "tool": {"type": "tool_definition", "definition": tool},
    }
    messages = [USER, {"role": "system", "content": [change]}]
    body = {"model": "fake", "messages": messages}
    if path == PATHS["messages"]:
        body |= {"max_tokens": 4, "stream": streaming}
    message, _ = refusal(gateway().post(path, json=body), "messages")
    assert "messages[1].content[0]" in message
    assert "tool_addition" in message
