"""vLLM's OpenAI serving classes behind one small interface: JSON object in, answer out.

The only module that constructs serving classes of `vllm.entrypoints`. Every operation takes the
decoded JSON body and returns either a dict (the whole answer) or an async iterator of
server-sent event texts (a stream), or raises ApiError.
"""

from __future__ import annotations

import logging
from typing import Any

from pydantic import BaseModel
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeRequest
from vllm.entrypoints.serve.tokenize.serving import ServingTokenization
from vllm.renderers.chat_utils import ChatTemplateResolutionError, load_chat_template
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.renderers.params import ChatParams
from vllm.utils.mistral import is_mistral_tokenizer

from app.llm import vllm_errors
from app.llm.request_usage import count_tokenized
from app.serving.operation import Operation
from app.serving.parsers import consistent
from app.serving.request_models import ChatRequest, ItemsRequest, TextRequest
from app.serving.request_validation import Checks, tokenize_model
from app.serving.schemas import request_schemas
from app.serving.serving_classes import ChatServing, MessagesServing, TextServing
from app.settings import Settings
from app.validation.fields import names_of
from app.validation.output_limit import OutputLimit

logger = logging.getLogger(__name__)

# These log each refused request, and each tool call that the token limit cut, as an error with
# a stack: a client could fill the disk. What is our fault is logged by vllm_errors.py.
_LOG_CLIENT_MISTAKES = (
    "vllm.entrypoints.anthropic.serving",
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.completion.serving",
    "vllm.entrypoints.openai.responses.serving",
    "vllm.renderers.online_renderer",
    "vllm.tool_parsers",
)


class Adapter:
    """All operations of one engine."""

    def __init__(self, engine: EngineClient, settings: Settings) -> None:
        self.schemas: tuple[dict[str, dict[str, Any]], dict[str, Any]] = ({}, {})
        self._template_failure: str | None = None
        for vllm_logger in _LOG_CLIENT_MISTAKES:
            logging.getLogger(vllm_logger).setLevel(logging.CRITICAL)
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
            # As Responses tells it without being asked: tokens that the prefix cache had.
            "enable_prompt_tokens_details": True,
        }
        chat = ChatServing(engine, self.models, "assistant", **served, **common, **tools)
        text = TextServing(engine, self.models, **served)
        responses = OpenAIServingResponses(
            engine, self.models, self.renderer, request_logger=None, **common, **tools
        )
        responses.parser = consistent(responses.parser)
        messages = MessagesServing(engine, self.models, "assistant", **served, **common, **tools)
        tokens = ServingTokenization(self.models, self.renderer, request_logger=None, **common)
        checks = Checks(
            vocabulary=engine.model_config.get_vocab_size(),
            context=engine.model_config.max_model_len,
            text_only=not engine.model_config.is_multimodal_model,
            reads_calls=settings.model.tool_call_parser is not None
            or self.renderer.use_harmony
            or is_mistral_tokenizer(engine.renderer.tokenizer),
            reads_reasoning=settings.model.reasoning_parser is not None,
            limits=settings.limits,
            unknown_tools=settings.model.unknown_tools,
            tells_tokens=_tells_tokens(engine, settings),
            any_arguments=responses.use_harmony,
        )

        def lost() -> bool:
            return bool(engine.errored)

        # What these classes obey (vllm/entrypoints/serve/utils/api_utils.py, get_max_tokens).
        default = chat.default_sampling_params.get("max_tokens")
        bounds = (engine.model_config.max_model_len, chat.override_max_tokens)
        most = min(bound for bound in bounds if bound is not None)
        limit_of_text = TextRequest.model_fields["max_tokens"].default

        self.operations = {
            operation.name: operation
            for operation in (
                Operation(
                    "chat",
                    "messages",
                    ChatRequest.model_validate,
                    chat.create_chat_completion,
                    checks.chat,
                    lost,
                    self.template_fails,
                    OutputLimit(("max_completion_tokens", "max_tokens"), default, most),
                ),
                Operation(
                    "completions",
                    "prompt",
                    TextRequest.model_validate,
                    text.create_completion,
                    checks.completions,
                    lost,
                    self.template_fails,
                    OutputLimit(names_of("max_tokens", "completions"), limit_of_text, most),
                ),
                Operation(
                    "responses",
                    "input",
                    ItemsRequest.model_validate,
                    responses.create_responses,
                    checks.responses,
                    lost,
                    self.template_fails,
                    OutputLimit(("max_output_tokens",), default, most),
                ),
                Operation(
                    "messages",
                    "messages",
                    AnthropicMessagesRequest.model_validate,
                    messages.create_messages,
                    checks.messages,
                    lost,
                    self.template_fails,
                    OutputLimit(("max_tokens",), default, most),
                ),
                Operation(
                    "count_tokens",
                    "messages",
                    AnthropicCountTokensRequest.model_validate,
                    count_tokenized(
                        lambda request: messages.count_tokens(request, None),
                        lambda _, answer: getattr(answer, "input_tokens", None),
                    ),
                    checks.count_tokens,
                    lost,
                    self.template_fails,
                ),
                Operation(
                    "tokenize",
                    "prompt",
                    _parse_tokenize,
                    count_tokenized(
                        lambda request: tokens.create_tokenize(request, None),
                        lambda _, answer: getattr(answer, "count", None),
                    ),
                    checks.tokenize,
                    lost,
                    self.template_fails,
                ),
                Operation(
                    "detokenize",
                    "tokens",
                    DetokenizeRequest.model_validate,
                    count_tokenized(
                        lambda request: tokens.create_detokenize(request, None),
                        lambda request, _: len(request.tokens),
                    ),
                    checks.detokenize,
                    lost,
                    self.template_fails,
                ),
            )
        }

    def warm_up(self) -> None:
        """Try the chat template, and load the tokenizer's caches before the first user."""
        self._try_template()
        self.renderer.warmup()
        self.schemas = request_schemas()

    def template_fails(self, message: str) -> bool:
        """Whether the chat template failed with this message at start-up."""
        return message == self._template_failure

    def _try_template(self) -> None:
        """Render a plain user message. A template that fails for it fails for every request, which
        is then no client's mistake. Text completions are served all the same."""
        parameters = ChatParams(
            chat_template=self.renderer.chat_template,
            chat_template_content_format=self.renderer.chat_template_content_format,
            chat_template_kwargs=self.renderer.default_chat_template_kwargs,
        )
        try:
            self.renderer.renderer.render_messages(
                [{"role": "user", "content": "Hello"}], parameters
            )
        except ChatTemplateResolutionError:  # the model has none: it is not made for chats
            logger.info("the model has no chat template: chats are refused")
        except Exception as error:
            told = vllm_errors.from_exception(error, {}, "messages")
            logger.error(
                "the chat template fails for a plain user message, chats get a 500: %s", error
            )
            if told.status < 500:
                self._template_failure = told.message


def _parse_tokenize(payload: dict[str, Any]) -> BaseModel:
    return tokenize_model(payload).model_validate(payload)


def _tells_tokens(engine: EngineClient, settings: Settings) -> bool:
    """Whether the engine core tells with each output what was drafted for it: nothing, or what the
    scheduler of this project counts (drafters/vllm/scheduling/scheduler.py)."""
    if engine.vllm_config.speculative_config is None:
        return True
    return settings.speculates and settings.speculation.speculation_header
