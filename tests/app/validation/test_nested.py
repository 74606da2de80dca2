"""Unknown fields inside of objects, with the requests that real clients send as the other side."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

from app.endpoints import declared
from app.errors import ApiError
from app.serving.request_models import ChatRequest, TextRequest
from app.validation.nested import check_nested

USER = {"role": "user", "content": "hi"}
MODELS: dict[str, Any] = {
    "chat": ChatRequest,
    "completions": TextRequest,
    "responses": ResponsesRequest,
    "messages": AnthropicMessagesRequest,
}
IGNORED = {endpoint.name: endpoint.ignored_members for endpoint in declared()}
FUNCTION = {"name": "f", "parameters": {"x-anything": {"goes": 1}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("dialect", "payload", "param"),
    [
        ("chat", {"messages": [{**USER, "contents": "x"}]}, "messages[0].contents"),
        (
            "chat",
            {"messages": [{"role": "assistant", "tool_call": [CALL], "content": "x"}]},
            "messages[0].tool_call",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "txt": 1}]}]},
            "messages[0].content[0].txt",
        ),
        (
            "chat",
            {"tools": [{"type": "function", "function": {**FUNCTION, "strickt": True}}]},
            "tools[0].function.strickt",
        ),
        (
            "chat",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {}, "strickt": True},
                }
            },
            "response_format.json_schema.strickt",
        ),
        ("chat", {"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ("chat", {"stream_options": {"usage": True}}, "stream_options.usage"),
        ("chat", {"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ("chat", {"structured_outputs": {"_backend": "a"}}, "structured_outputs._backend"),
        ("completions", {"stream_options": {"usage": True}}, "stream_options.usage"),
        ("responses", {"input": [{**USER, "contents": "x"}]}, "input[0].contents"),
        ("responses", {"reasoning": {"efort": "low"}}, "reasoning.efort"),
        ("responses", {"text": {"fromat": {}}}, "text.fromat"),
        (
            "responses",
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {}, "foo": 1}}},
            "text.format.foo",
        ),
        (
            "responses",
            {"tools": [{"type": "function", **FUNCTION, "strickt": True}]},
            "tools[0].strickt",
        ),
        ("messages", {"messages": [{**USER, "name": "x"}]}, "messages[0].name"),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "text", "txt": "a"}]}]},
            "messages[0].content[0].txt",
        ),
        (
            "messages",
            {"tools": [{"name": "f", "input_schema": {}, "parameters": {}}]},
            "tools[0].parameters",
        ),
        ("messages", {"thinking": {"type": "enabled", "budget": 5}}, "thinking.budget"),
        ("messages", {"tool_choice": {"type": "auto", "parallel": 5}}, "tool_choice.parallel"),
    ],
)
def test_unknown_fields_are_refused_at_their_place(
    dialect: str, payload: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        check_nested(payload, MODELS[dialect], IGNORED[dialect])
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.code == "unknown_parameter"


@pytest.mark.parametrize(
    ("dialect", "payload"),
    [
        (
            "chat",
            {
                "messages": [
                    {"role": "system", "content": "be brief", "name": "s"},
                    {"role": "developer", "content": [{"type": "text", "text": "x"}]},
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]},
                    {
                        "role": "assistant",
                        "content": "x",
                        "refusal": "no",
                        "annotations": [],
                        "reasoning": "because",
                        "reasoning_content": "because",
                        "tool_calls": [{**CALL, "index": 0}],
                        "function_call": {"name": "f", "arguments": "{}"},
                        "audio": {"id": "a"},
                    },
                    {"role": "tool", "tool_call_id": "c", "content": "1", "name": "f"},
                ],
                "tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}],
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "stream_options": {"include_usage": True, "include_obfuscation": False},
                "logit_bias": {"5": 1},
                "chat_template_kwargs": {"a": {"b": 1}},
                "structured_outputs": {"json": {"any": "thing"}, "whitespace_pattern": " "},
            },
        ),
        (
            "responses",
            {
                "input": [
                    USER,
                    {"type": "message", "role": "user", "content": [{"type": "input_text"}]},
                    {
                        "type": "message",
                        "id": "m",
                        "role": "assistant",
                        "status": "completed",
                        "content": [
                            {"type": "output_text", "text": "a", "annotations": [], "logprobs": []}
                        ],
                    },
                    {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"},
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": "1", "id": "o"},
                    {"type": "no_such_item", "anything": 1},
                ],
                "reasoning": {"effort": "low", "summary": "auto"},
                "text": {"format": {"type": "text"}, "verbosity": "low"},
                "tools": [{"type": "function", **FUNCTION, "strict": True, "description": "d"}],
                "tool_choice": {"type": "function", "name": "f"},
                "metadata": {"a": "b"},
            },
        ),
        (
            "messages",
            {
                "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a", "citations": []}]},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "a", "signature": "s"},
                            {"type": "tool_use", "id": "c", "name": "f", "input": {"any": 1}},
                        ],
                    },
                ],
                "tools": [{"type": "custom", "name": "f", "input_schema": {"any": 1}}],
                "thinking": {"type": "adaptive"},
                "output_config": {"effort": "low"},
                "metadata": {"user_id": "u"},
            },
        ),
    ],
)
def test_what_clients_send_passes(dialect: str, payload: dict[str, Any]) -> None:
    check_nested(payload, MODELS[dialect], IGNORED[dialect])


def test_depth_is_the_clients_choice() -> None:
    deep: Any = {"type": "and", "filters": []}
    for _ in range(3000):
        deep = {"type": "and", "filters": [deep]}
    check_nested(
        {"tools": [{"type": "file_search", "filters": deep}]},
        ResponsesRequest,
        IGNORED["responses"],
    )
