"""Requests in the shape in which coding agents send them: answered, whole and streamed.

Shaped after what Claude Code (Messages) and Codex (Responses) put on the wire: their fields,
blocks, headers and kinds of tools, with texts and schemas of our own.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.app.serving.test_dialects import STREAMING, TOOL_ANSWER, Gateway

CACHED = {"cache_control": {"type": "ephemeral"}}
DRAFT_07 = "http://json-schema.org/draft-07/schema#"

CLAUDE_CODE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "x-app": "cli",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
    "user-agent": "claude-cli/2.0.0 (external, cli)",
}
CLAUDE_CODE: dict[str, Any] = {
    "model": "fake",
    "max_tokens": 32,
    "temperature": 1,
    "system": [
        {"type": "text", "text": "You are a coding agent.", **CACHED},
        {"type": "text", "text": "Answer in few words.", **CACHED},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"},
                {"type": "text", "text": "List the files.", **CACHED},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": "a.py",
                    "is_error": False,
                    **CACHED,
                }
            ],
        },
    ],
    "tools": [
        {
            "name": "Bash",
            "description": "Runs a command.",
            "input_schema": {
                "$schema": DRAFT_07,
                "type": "object",
                "properties": {
                    "command": {"type": "string", "description": "The command"},
                    "timeout": {"type": "number", "exclusiveMinimum": 0, "maximum": 600000},
                    "run_in_background": {"type": "boolean", "default": False},
                },
                "required": ["command"],
                "additionalProperties": False,
            },
        },
        {
            "name": "TodoWrite",
            "description": "Keeps a list.",
            "input_schema": {
                "$schema": DRAFT_07,
                "type": "object",
                "properties": {
                    "todos": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "properties": {
                                "content": {"type": "string", "minLength": 1},
                                "status": {"type": "string", "enum": ["pending", "completed"]},
                            },
                            "required": ["content", "status"],
                        },
                    }
                },
                "required": ["todos"],
            },
        },
        {
            "name": "mcp__server__query",  # of a tool server, with a schema of its own kind
            "description": "Asks.",
            "input_schema": {
                "type": "object",
                "properties": {
                    "limit": {"type": "integer", "multipleOf": 5},
                    "url": {"type": "string", "format": "url"},
                    "tags": {"type": "array", "uniqueItems": True},
                },
                "anyOf": [{"required": ["limit"]}, {"required": ["url"]}],
            },
        },
        {"name": "mcp__server__ping", "description": "No input.", "input_schema": {}},
    ],
    "metadata": {"user_id": "user_0_account__session_0"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "service_tier": "auto",
}
CODEX: dict[str, Any] = {
    "model": "fake",
    "max_output_tokens": 32,
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions>read-only</permissions>"}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "List the files."}],
        },
        {
            "type": "function_call",
            "name": "shell",
            "arguments": '{"command": ["ls"]}',
            "call_id": "call_1",
        },
        {"type": "function_call_output", "call_id": "call_1", "output": "a.py"},
    ],
    "tools": [
        {
            "type": "function",
            "name": "shell",
            "description": "Runs a command.",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {
                    "command": {"type": "array", "items": {"type": "string"}},
                    "timeout_ms": {"type": "number"},
                },
                "required": ["command"],
                "additionalProperties": False,
            },
        },
        {"type": "function", "name": "list_mcp_resources", "strict": False, "parameters": None},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": None,
    "store": False,
    "include": [],
    "prompt_cache_key": "0190",
}


@STREAMING
def test_claude_code(gateway: Gateway, streaming: bool) -> None:
    client = gateway(tool_call_parser="hermes", answer=TOOL_ANSWER)
    body = {**CLAUDE_CODE, "stream": streaming}
    path = "/v1/messages?beta=true"
    response = client.post(path, json=body, headers=CLAUDE_CODE_HEADERS)
    assert response.status_code == 200, response.text
    assert "tool_use" in response.text
    assert response.headers["request-id"]


def test_claude_code_counts_before_it_asks(gateway: Gateway) -> None:
    client = gateway(tool_call_parser="hermes", answer=TOOL_ANSWER)
    counted = {name: CLAUDE_CODE[name] for name in ("model", "system", "messages", "tools")}
    response = client.post(
        "/v1/messages/count_tokens?beta=true", json=counted, headers=CLAUDE_CODE_HEADERS
    )
    assert response.status_code == 200, response.text
    assert response.json()["input_tokens"] > 50
    assert "stop_sequence" not in response.json()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_claude_code_asks_a_model_without_reasoning_to_think(gateway: Gateway, path: str) -> None:
    client = gateway(tool_call_parser="hermes", answer=TOOL_ANSWER)
    fields = set(CLAUDE_CODE)
    if path.endswith("count_tokens"):
        fields = {"model", "system", "messages", "tools"}
    body = {name: value for name, value in CLAUDE_CODE.items() if name in fields}
    if "max_tokens" in body:
        body["max_tokens"] = 1500
    body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    response = client.post(path, json=body, headers=CLAUDE_CODE_HEADERS)
    assert response.status_code == 200, response.text
    if "max_tokens" in body:
        refused = client.post(path, json={**body, "max_tokens": 1024}, headers=CLAUDE_CODE_HEADERS)
        assert refused.status_code == 400
        assert "budget_tokens" in refused.text


@STREAMING
def test_codex(gateway: Gateway, streaming: bool) -> None:
    client = gateway(tool_call_parser="hermes", answer=TOOL_ANSWER)
    headers = {"originator": "codex_cli_rs", "session_id": "0190", "accept": "text/event-stream"}
    response = client.post("/v1/responses", json={**CODEX, "stream": streaming}, headers=headers)
    assert response.status_code == 200, response.text
    assert "function_call" in response.text
