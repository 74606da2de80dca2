"""Validation of a request body, by operation, before vLLM's request model sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest

from app.serving.request_models import (
    ChatRequest,
    TextRequest,
    TokenizeMessagesRequest,
    TokenizeTextRequest,
)
from app.settings import LimitSettings
from app.validation import (
    constraints,
    field_checks,
    fields,
    message_checks,
    nested,
    replay,
    size_limits,
    tools,
)
from app.validation.speculation_field import GENERATES, take_options

Payload = dict[str, Any]


@dataclass(frozen=True)
class Checks:
    """The checks for one model. Each raises ApiError naming the field, or drops fields that
    are accepted without effect."""

    vocabulary: int
    context: int  # tokens
    text_only: bool
    reads_calls: bool  # whether the model's tool calls are read
    reads_reasoning: bool  # whether the model's reasoning is told from its answer
    limits: LimitSettings
    unknown_tools: tools.Unknown = "refuse"
    tells_tokens: bool = True  # whether it is known which tokens were drafted
    any_arguments: bool = False  # whether the prompt takes calls whose arguments are no object

    def chat(self, payload: Payload) -> None:
        """Check a body of POST /v1/chat/completions."""
        message_checks.check_messages(payload.get("messages"))
        self._check_tools(payload, "chat")
        self._common(payload, ChatRequest, "chat", "messages")
        self._replay_chat(payload)

    def completions(self, payload: Payload) -> None:
        """Check a body of POST /v1/completions."""
        field_checks.check_token_ids(payload, "prompt", self.vocabulary)
        self._common(payload, TextRequest, "completions")

    def responses(self, payload: Payload) -> None:
        """Check a body of POST /v1/responses."""
        if payload.get("input") == []:
            raise field_checks.invalid("input", "'input' must hold at least one item.")
        message_checks.check_items(payload.get("input"))
        self._check_tools(payload, "responses")
        self._common(payload, ResponsesRequest, "responses", "input")
        if payload.get("top_logprobs"):  # which ask for what OpenAI's API has a second field for
            payload["include"] = [*payload.get("include", []), "message.output_text.logprobs"]
        if isinstance(payload.get("input"), list):
            payload["input"] = replay.response_items(
                payload["input"], any_arguments=self.any_arguments
            )

    def messages(self, payload: Payload) -> None:
        """Check a body of POST /v1/messages."""
        message_checks.check_blocks(payload.get("messages"))
        self._check_tools(payload, "messages")
        self._common(payload, AnthropicMessagesRequest, "messages", "messages")
        _replay_anthropic(payload)

    def count_tokens(self, payload: Payload) -> None:
        """Check a body of POST /v1/messages/count_tokens."""
        message_checks.check_blocks(payload.get("messages"))
        self._check_tools(payload, "count_tokens")
        self._common(payload, AnthropicCountTokensRequest, "count_tokens", "messages")
        _replay_anthropic(payload)

    def tokenize(self, payload: Payload) -> None:
        """Check a body of POST /tokenize, with a prompt or with messages."""
        if "messages" in payload:
            message_checks.check_messages(payload["messages"])
        self._check_tools(payload, "tokenize")
        self._common(payload, tokenize_model(payload), "tokenize", "messages")
        if "messages" in payload:
            self._replay_chat(payload)

    def detokenize(self, payload: Payload) -> None:
        """Check a body of POST /detokenize."""
        field_checks.check_token_count(payload.get("tokens"), "tokens", self.context)
        field_checks.check_token_ids(payload, "tokens", self.vocabulary)
        self._common(payload, DetokenizeRequest, "detokenize")

    def _replay_chat(self, payload: Payload) -> None:
        payload["messages"] = replay.chat_messages(
            payload["messages"], any_arguments=self.any_arguments
        )

    def _common(
        self, payload: Payload, model: type[BaseModel], operation: str, items: str = ""
    ) -> None:
        size_limits.check_template(payload)
        size_limits.check_counts(payload, self.limits)
        size_limits.check_constraints(payload, self.limits)
        if self.text_only:
            message_checks.check_media(payload.get(items), items)
        else:
            size_limits.check_urls(payload.get(items), items, self.limits.media_hosts)
        if operation in GENERATES:
            take_options(payload, operation, told=self.tells_tokens)
        field_checks.check_fields(payload, model, operation)
        field_checks.check_scalars(payload, model)
        field_checks.check_containers(payload, model)
        nested.check_nested(payload, model, operation)
        constraints.check_formats(payload)
        constraints.check_schemas(payload)
        field_checks.check_generation(payload, operation, self.limits, self.context)
        if not self.reads_reasoning:
            _refuse_thinking_budget(payload)
        fields.rename(payload, operation)

    def _check_tools(self, payload: Payload, operation: str) -> None:
        tools.take_unknown_tools(payload, operation, self.unknown_tools)
        if operation in ("chat", "tokenize"):
            message_checks.check_tools(payload)
        constraints.name_parameters(payload)
        if not self.reads_calls:
            tools.check_calls_are_read(payload, operation)


def _refuse_thinking_budget(payload: Payload) -> None:
    """A budget of reasoning cannot be kept where nobody sees where reasoning ends."""
    thinking = payload.get("thinking")
    if isinstance(thinking, dict) and thinking.get("type") == "enabled":
        name = "thinking"
    elif payload.get("thinking_token_budget") is not None:
        name = "thinking_token_budget"
    else:
        return
    raise field_checks.invalid(
        name,
        f"'{name}' is not supported: this server does not tell the model's reasoning from its "
        "answer, as it was started without --reasoning-parser.",
        "unsupported_parameter",
    )


def _replay_anthropic(payload: Payload) -> None:
    if isinstance(payload.get("messages"), list):
        payload["messages"] = replay.anthropic_messages(payload["messages"])


def tokenize_model(payload: Payload) -> type[BaseModel]:
    """vLLM has one request model for each of the two shapes."""
    return TokenizeMessagesRequest if "messages" in payload else TokenizeTextRequest
