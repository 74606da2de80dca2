"""POST /tokenize and /detokenize, as in vLLM's server: text to token ids, and back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel

from app.declaration.endpoint import Endpoint, Payload, ServingParts
from app.declaration.model_facts import ModelFacts
from app.request_usage import count_tokenized
from app.validation import message_checks, replay
from app.validation.field_checks import check_token_count, check_token_ids
from app.validation.fields import EVERYWHERE, TEMPLATE
from app.validation.nested import CHAT_MEMBERS
from app.validation.tools import ToolRules


def _tokenize_models() -> tuple[type[BaseModel], ...]:
    from app.serving.request_models import TokenizeMessagesRequest, TokenizeTextRequest

    return (TokenizeTextRequest, TokenizeMessagesRequest)


def _detokenize_models() -> tuple[type[BaseModel], ...]:
    from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest

    return (DetokenizeRequest,)


def _serving(parts: ServingParts) -> Any:
    from vllm.entrypoints.serve.tokenize.serving import ServingTokenization

    return ServingTokenization(parts.models, parts.renderer, request_logger=None, **parts.rendering)


def _tokenize(serving: Any) -> Callable[[Any], Awaitable[Any]]:
    return count_tokenized(
        lambda request: serving.create_tokenize(request, None),
        lambda _, answer: getattr(answer, "count", None),
    )


def _detokenize(serving: Any) -> Callable[[Any], Awaitable[Any]]:
    return count_tokenized(
        lambda request: serving.create_detokenize(request, None),
        lambda request, _: len(request.tokens),
    )


def _check_messages(payload: Payload, facts: ModelFacts) -> None:
    if "messages" in payload:
        message_checks.check_messages(payload["messages"])


def _rewrite_messages(payload: Payload, facts: ModelFacts) -> None:
    if "messages" in payload:
        payload["messages"] = replay.chat_messages(
            payload["messages"], any_arguments=facts.any_arguments
        )


def _check_tokens(payload: Payload, facts: ModelFacts) -> None:
    check_token_count(payload.get("tokens"), "tokens", facts.context)
    check_token_ids(payload, "tokens", facts.vocabulary)


ENDPOINTS = (
    Endpoint(
        name="tokenize",
        path="/tokenize",
        prompt="prompt",
        models=_tokenize_models,
        shape=lambda payload: 1 if "messages" in payload else 0,
        serving=_serving,
        call=_tokenize,
        items="messages",
        fields={**EVERYWHERE, "chat_template": TEMPLATE},
        ignored_members=CHAT_MEMBERS,
        tools=ToolRules(("function",), check=message_checks.check_tools, needs_parser=False),
        check=_check_messages,
        rewrite=_rewrite_messages,
    ),
    Endpoint(
        name="detokenize",
        path="/detokenize",
        prompt="tokens",
        models=_detokenize_models,
        serving=_serving,
        call=_detokenize,
        fields=EVERYWHERE,
        check=_check_tokens,
    ),
)
