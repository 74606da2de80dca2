"""vLLM's OpenAI serving classes behind one small interface: JSON object in, answer out.

The only module that constructs classes of `vllm.entrypoints`. Every operation takes the
decoded JSON body and returns either a dict (the whole answer) or an async iterator of
server-sent event texts (a stream), or raises ApiError.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, TypeAdapter
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.renderers.chat_utils import load_chat_template
from vllm.renderers.online_renderer import OnlineRenderer

from app.engine import failures, strict
from app.engine.first_output import FirstOutput, expect
from app.engine.protocol import ChatRequest, TextRequest
from app.errors import ApiError
from app.settings import Settings

Payload = dict[str, Any]
Answer = dict[str, Any] | AsyncIterator[str]


@dataclass(frozen=True)
class Reply:
    """An operation's result. `first` tells when a stream's first token exists."""

    answer: Answer
    first: FirstOutput


@dataclass(frozen=True)
class Operation:
    """One API operation: how its body is checked and who answers it.

    `prompt` names the field that holds the prompt, for over-long ones.
    """

    name: str
    prompt: str
    parse: Callable[[Payload], BaseModel]
    call: Callable[[Any], Awaitable[Any]]
    check: Callable[[Payload], None]

    async def __call__(self, payload: Payload) -> Reply:
        """Answer one request. Raises ApiError; never returns an error as an answer."""
        first = expect()
        try:
            self.check(payload)
            result = await self.call(self.parse(payload))
        except Exception as error:
            raise failures.from_exception(first.error or error, payload, self.prompt) from error
        if isinstance(result, ErrorResponse):
            if first.error is not None:
                raise failures.from_exception(first.error, payload, self.prompt)
            raise failures.from_response(result, payload, self.prompt)
        if isinstance(result, BaseModel):
            return Reply(self._body(result), first)
        return Reply(
            _as_events(result, lambda error: failures.from_response(error, payload, self.prompt)),
            first,
        )

    def failure(self, error: BaseException, payload: Payload) -> ApiError:
        """The ApiError for an error that FirstOutput recorded."""
        return failures.from_exception(error, payload, self.prompt)

    def _body(self, result: BaseModel) -> dict[str, Any]:
        if self.name == "responses":  # OpenAI's schema wants this object's nulls
            return result.model_dump(mode="json", by_alias=True)
        if self.name == "messages":
            return {"stop_sequence": None, **result.model_dump(mode="json", exclude_none=True)}
        return without_nulls(result.model_dump(mode="json"))


# These log each refused request as an error, with a stack where there is one: a client
# could fill the disk. What is our fault is logged by failures.py.
_LOG_CLIENT_MISTAKES = (
    "vllm.entrypoints.anthropic.serving",
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.completion.serving",
    "vllm.entrypoints.openai.responses.serving",
    "vllm.renderers.online_renderer",
)


class Adapter:
    """All operations of one engine."""

    def __init__(self, engine: EngineClient, settings: Settings) -> None:
        for logger in _LOG_CLIENT_MISTAKES:
            logging.getLogger(logger).setLevel(logging.CRITICAL)
        name = settings.served_model_name
        self.models = OpenAIServingModels(
            engine_client=engine,
            base_model_paths=[BaseModelPath(name=name, model_path=settings.model.model)],
        )
        template = load_chat_template(settings.model.chat_template)
        tools: dict[str, Any] = {
            "enable_auto_tools": settings.model.tool_call_parser is not None,
            "tool_parser": settings.model.tool_call_parser,
            "tool_strict_level": settings.model.tool_strict_level,
            "reasoning_parser": settings.model.reasoning_parser or "",
        }
        common: dict[str, Any] = {
            "chat_template": template,
            "chat_template_content_format": "auto",
        }
        self.renderer = OnlineRenderer(
            model_config=engine.model_config,
            renderer=engine.renderer,
            request_logger=None,
            **common,
            **tools,
        )
        served: dict[str, Any] = {
            "online_renderer": self.renderer,
            "request_logger": None,
        }
        chat = OpenAIServingChat(engine, self.models, "assistant", **served, **common, **tools)
        text = OpenAIServingCompletion(engine, self.models, **served)
        responses = OpenAIServingResponses(
            engine, self.models, self.renderer, request_logger=None, **common, **tools
        )
        messages = AnthropicServingMessages(
            engine, self.models, "assistant", **served, **common, **tools
        )
        tokens = ServingTokenization(self.models, self.renderer, request_logger=None, **common)
        self.operations = {
            operation.name: operation
            for operation in (
                Operation(
                    "chat",
                    "messages",
                    ChatRequest.model_validate,
                    chat.create_chat_completion,
                    _check_chat,
                ),
                Operation(
                    "completions",
                    "prompt",
                    TextRequest.model_validate,
                    text.create_completion,
                    _checker(TextRequest, "completions"),
                ),
                Operation(
                    "responses",
                    "input",
                    ResponsesRequest.model_validate,
                    responses.create_responses,
                    _checker(ResponsesRequest, "responses"),
                ),
                Operation(
                    "messages",
                    "messages",
                    AnthropicMessagesRequest.model_validate,
                    messages.create_messages,
                    _checker(AnthropicMessagesRequest, "messages"),
                ),
                Operation(
                    "count_tokens",
                    "messages",
                    AnthropicCountTokensRequest.model_validate,
                    lambda request: messages.count_tokens(request, None),
                    _checker(AnthropicCountTokensRequest, "count_tokens"),
                ),
                Operation(
                    "tokenize",
                    "prompt",
                    _parse_tokenize,
                    lambda request: tokens.create_tokenize(request, None),
                    _check_tokenize,
                ),
                Operation(
                    "detokenize",
                    "tokens",
                    DetokenizeRequest.model_validate,
                    lambda request: tokens.create_detokenize(request, None),
                    _checker(DetokenizeRequest, "detokenize"),
                ),
            )
        }

    def warm_up(self) -> None:
        """Compile the chat template and load the tokenizer's caches before the first user."""
        self.renderer.warmup()


def _checker(model: type[BaseModel], operation: str) -> Callable[[Payload], None]:
    def check(payload: Payload) -> None:
        strict.check_fields(payload, model, operation)
        strict.check_scalars(payload, model)
        strict.check_generation(payload)

    return check


_check_chat_fields = _checker(ChatRequest, "chat")


def _check_chat(payload: Payload) -> None:
    strict.check_messages(payload.get("messages"))
    strict.check_tools(payload)
    _check_chat_fields(payload)


def _tokenize_model(payload: Payload) -> type[BaseModel]:
    return TokenizeChatRequest if "messages" in payload else TokenizeCompletionRequest


def _check_tokenize(payload: Payload) -> None:
    _checker(_tokenize_model(payload), "tokenize")(payload)
    if "messages" in payload:
        strict.check_messages(payload["messages"])


def _parse_tokenize(payload: Payload) -> BaseModel:
    return TypeAdapter(_tokenize_model(payload)).validate_python(payload)


# Fields that OpenAI's schema declares nullable; any other null is left out.
_NULLABLE = frozenset({"content", "refusal", "logprobs", "finish_reason", "usage", "bytes"})
_STREAMED_NULL = re.compile(rf',"(?!(?:{"|".join(sorted(_NULLABLE))})")[a-z_]+":null')


def without_nulls(value: Any) -> Any:
    """A copy without null fields, but for the nullable ones. Lists keep their nulls."""
    if isinstance(value, dict):
        return {
            key: without_nulls(item)
            for key, item in value.items()
            if item is not None or key in _NULLABLE
        }
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def without_streamed_nulls(event: str) -> str:
    """The same on an event's JSON text. Quotes inside JSON strings are escaped, so the
    pattern can only match a field."""
    return _STREAMED_NULL.sub("", event) if "null" in event else event


_ERROR_EVENT = 'data: {"error":'


async def _as_events(
    stream: AsyncGenerator[Any, None], to_error: Callable[[ErrorResponse], ApiError]
) -> AsyncGenerator[str, None]:
    """Ready-made event texts as they are; Responses events (objects) framed here.

    An error after the first token can only be an event: it gets our envelope.
    """
    try:
        async for item in stream:
            if isinstance(item, str) and item.startswith(_ERROR_EVENT):
                response = ErrorResponse.model_validate_json(item.removeprefix("data:"))
                yield f"data: {json.dumps(to_error(response).envelope())}\n\n"
            elif isinstance(item, str):
                yield without_streamed_nulls(item)
            else:
                data = item.model_dump_json(by_alias=True)
                yield f"event: {item.type}\ndata: {data}\n\n"
    finally:
        await stream.aclose()
