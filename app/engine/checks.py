"""Which checks a body passes, by operation, before vLLM's request model sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)

from app.engine import bounds, conversation, strict
from app.engine.protocol import ChatRequest, TextRequest
from app.engine.speculation import take_limit
from app.settings import LimitSettings

Payload = dict[str, Any]

GENERATES = ("chat", "completions", "responses", "messages")


@dataclass(frozen=True)
class Checks:
    """The checks for one model. Each raises ApiError naming the field, or drops fields that
    are accepted without effect."""

    vocabulary: int
    text_only: bool
    limits: LimitSettings

    def chat(self, payload: Payload) -> None:
        """POST /v1/chat/completions."""
        conversation.check_messages(payload.get("messages"))
        conversation.check_tools(payload)
        self._common(payload, ChatRequest, "chat", "messages")

    def completions(self, payload: Payload) -> None:
        """POST /v1/completions."""
        strict.check_token_ids(payload, "prompt", self.vocabulary)
        self._common(payload, TextRequest, "completions")

    def responses(self, payload: Payload) -> None:
        """POST /v1/responses."""
        if payload.get("input") == []:
            raise strict.invalid("input", "'input' must hold at least one item.")
        self._common(payload, ResponsesRequest, "responses", "input")

    def messages(self, payload: Payload) -> None:
        """POST /v1/messages."""
        self._common(payload, AnthropicMessagesRequest, "messages", "messages")

    def count_tokens(self, payload: Payload) -> None:
        """POST /v1/messages/count_tokens."""
        self._common(payload, AnthropicCountTokensRequest, "count_tokens", "messages")

    def tokenize(self, payload: Payload) -> None:
        """POST /tokenize, with a prompt or with messages."""
        if "messages" in payload:
            conversation.check_messages(payload["messages"])
        self._common(payload, tokenize_model(payload), "tokenize", "messages")

    def detokenize(self, payload: Payload) -> None:
        """POST /detokenize."""
        strict.check_token_ids(payload, "tokens", self.vocabulary)
        self._common(payload, DetokenizeRequest, "detokenize")

    def _common(
        self, payload: Payload, model: type[BaseModel], operation: str, items: str = ""
    ) -> None:
        bounds.check_template(payload)
        bounds.check_counts(payload, self.limits)
        bounds.check_constraints(payload, self.limits)
        if self.text_only:
            conversation.check_media(payload.get(items), items)
        else:
            bounds.check_urls(payload.get(items), items, self.limits.media_hosts)
        if operation in GENERATES:
            take_limit(payload)
        strict.check_fields(payload, model, operation)
        strict.check_scalars(payload, model)
        strict.check_containers(payload, model)
        strict.check_generation(payload, operation, self.limits)


def tokenize_model(payload: Payload) -> type[BaseModel]:
    """vLLM has one request model for each of the two shapes."""
    return TokenizeChatRequest if "messages" in payload else TokenizeCompletionRequest
