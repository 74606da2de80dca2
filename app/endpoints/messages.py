"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, ClassVar

from pydantic import BaseModel

from app.declaration.answers import AnswerFormat
from app.declaration.endpoint import Endpoint, Payload, ServingParts
from app.declaration.model_facts import ModelFacts
from app.errors import ApiError
from app.request_usage import count_tokenized
from app.validation import message_checks, replay
from app.validation.fields import (
    AS_SENT,
    CACHE,
    EVERYWHERE,
    GENERATING,
    LABEL,
    TIER,
    OnlyAt,
    Rule,
    WithoutEffect,
)
from app.validation.tools import ToolRules, check_anthropic_choice

# Prefixes of answers' ids: inside vLLM, Messages are chats.
_CHAT_ID, _MESSAGE_ID = "chatcmpl-", "msg_"
_MESSAGE_START = "event: message_start\n"
_BLOCK_START = "event: content_block_start\n"
_MESSAGE_DELTA = "event: message_delta\n"  # the end of the content
_EMPTY_TEXT = (
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": ""}},
    {"type": "content_block_stop", "index": 0},
)
_THINKING = '"content_block":{"type":"thinking",'
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_FIELDS: dict[str, Rule] = {
    **EVERYWHERE,
    "cache_control": WithoutEffect(dict, CACHE),
    "context_management": WithoutEffect(dict, AS_SENT),
    "mcp_servers": OnlyAt(([],), "this server calls no tools itself"),
    "output_format": OnlyAt((), "it is now the 'format' in 'output_config'"),  # older clients' name
    "speed": WithoutEffect(str, "every answer comes as fast as it can"),
    "user_profile_id": WithoutEffect(str, LABEL),
}
_IGNORED_MEMBERS = frozenset(
    {
        *("allowed_callers", "cache_control", "caller", "citations", "context", "title"),
        *("eager_input_streaming", "input_examples", "task_budget", "type"),
    }
)
# vLLM's errors are about the chat that it makes of the messages.
_NAMES_IN_ERRORS = {
    "chat_template": "chat_template_kwargs",
    "max_completion_tokens": "max_tokens",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}


class MessagesFormat(AnswerFormat):
    """The form of Anthropic's Messages."""

    id_headers = ("request-id",)
    error_name = "AnthropicError"
    error_schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            },
            "request_id": {"type": "string"},
        },
    }

    def body(self, answer: BaseModel) -> dict[str, Any]:
        """The JSON of a whole message, or of a count of tokens."""
        message = answer.model_dump(mode="json", exclude_none=True)
        if "id" not in message:
            return message  # a count of tokens
        message["id"] = _MESSAGE_ID + message["id"].removeprefix(_CHAT_ID)
        return {"stop_sequence": None, **message}

    async def corrected(self, stream: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """The events, with a block of empty text in an answer that has no other block.

        vLLM has it in a whole answer: clients read the text of the first block, and Anthropic's
        `get_final_text` raises without one.
        """
        has_block = False
        try:
            async for item in stream:
                has_block = has_block or item.startswith(_BLOCK_START)
                if item.startswith(_MESSAGE_DELTA) and not has_block:
                    for event in _EMPTY_TEXT:
                        yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
                yield item
        finally:
            await stream.aclose()

    def event(self, item: Any, *, null_usage: bool = False) -> str:
        """The text of an event."""
        text: str = item
        if text.startswith(_MESSAGE_START):
            return text.replace(f'"id":"{_CHAT_ID}', f'"id":"{_MESSAGE_ID}', 1)
        if text.startswith(_BLOCK_START):  # vLLM leaves out the signature, which comes later
            return text.replace(_THINKING, f'{_THINKING}"signature":"",', 1)
        return text

    def error_event(self, error: ApiError, sequence_number: int = 0) -> str:
        """An error as an event."""
        body = self.error_body(error, None)
        return f"event: error\ndata: {json.dumps(body)}\n\n"

    def error_body(self, error: ApiError, request_id: str | None) -> dict[str, Any]:
        """The JSON of a response with an error; it has the request's id."""
        default = "api_error" if error.status >= 500 else "invalid_request_error"
        kind = _ERROR_TYPES.get(error.status, default)
        body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": error.message}}
        return body if request_id is None else body | {"request_id": request_id}


def _messages_models() -> tuple[type[BaseModel], ...]:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest

    return (AnthropicMessagesRequest,)


def _count_models() -> tuple[type[BaseModel], ...]:
    from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest

    return (AnthropicCountTokensRequest,)


def _serving(parts: ServingParts) -> Any:
    from app.serving.classes.messages import MessagesServing

    return parts.chat(MessagesServing)


def _count_serving(parts: ServingParts) -> Any:
    from app.serving.classes.messages import MessageCountServing

    return parts.chat(MessageCountServing)


def _count(serving: Any) -> Callable[[Any], Awaitable[Any]]:
    return count_tokenized(
        lambda request: serving.count_tokens(request, None),
        lambda _, answer: getattr(answer, "input_tokens", None),
    )


def _check(payload: Payload, facts: ModelFacts) -> None:
    message_checks.check_blocks(payload)


def _rewrite(payload: Payload, facts: ModelFacts) -> None:
    if isinstance(payload.get("messages"), list):
        payload["messages"] = replay.anthropic_messages(payload["messages"])


ENDPOINTS = (
    Endpoint(
        name="messages",
        path="/v1/messages",
        prompt="messages",
        models=_messages_models,
        serving=_serving,
        call=lambda serving: serving.create_messages,
        items="messages",
        fields={
            **_FIELDS,
            **GENERATING,
            "container": OnlyAt((), "this server runs no code"),
            "diagnostics": WithoutEffect(dict, "no request is compared with an earlier one"),
            "inference_geo": WithoutEffect(str, "the model runs where this server is"),
            "metadata": WithoutEffect(dict, LABEL),
            "service_tier": WithoutEffect(str, TIER),
        },
        ignored_members=_IGNORED_MEMBERS,
        names_in_errors=_NAMES_IN_ERRORS,
        tools=ToolRules(("custom",), check=check_anthropic_choice),
        check=_check,
        rewrite=_rewrite,
        generates=True,
        output_limit=("max_tokens",),
        answers=MessagesFormat(),
        trace_operation="chat",
    ),
    Endpoint(
        name="count_tokens",
        path="/v1/messages/count_tokens",
        prompt="messages",
        models=_count_models,
        serving=_count_serving,
        call=_count,
        items="messages",
        fields=_FIELDS,
        ignored_members=_IGNORED_MEMBERS,
        names_in_errors=_NAMES_IN_ERRORS,
        tools=ToolRules(("custom",), check=check_anthropic_choice, needs_parser=False),
        check=_check,
        rewrite=_rewrite,
        answers=MessagesFormat(),
    ),
)
