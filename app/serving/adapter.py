"""vLLM's serving classes behind one small interface: JSON object in, answer out.

The adapter makes the serving classes that endpoints declare. Every operation takes the decoded JSON
body and returns either a dict (the whole answer) or an async iterator of server-sent event texts (a
stream), or raises ApiError.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pydantic import BaseModel
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.renderers.chat_utils import ChatTemplateResolutionError, load_chat_template
from vllm.renderers.params import ChatParams
from vllm.utils.mistral import is_mistral_tokenizer

from app.declaration.endpoint import Endpoint, Payload, ServingParts
from app.declaration.held_calls import CallGrammar
from app.declaration.model_facts import ModelFacts
from app.declaration.request_checks import check_request
from app.llm import vllm_errors
from app.serving.operation import Operation
from app.serving.parsers.call_grammar import call_grammar
from app.serving.parsers.consistent import bounds_reasoning
from app.serving.renderer import Renderer
from app.serving.schemas import request_schemas
from app.serving.single_calls import TOOL, takes_single_calls
from app.settings import Settings
from app.validation.output_limit import OutputLimit

Models = tuple[type[BaseModel], ...]

logger = logging.getLogger(__name__)

# These log each refused request, and each tool call that the token limit cut, as an error with
# a stack: a client could fill the disk. app/llm/vllm_errors.py logs the server's own failures.
_LOG_CLIENT_MISTAKES = (
    "vllm.entrypoints.anthropic.serving",
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.completion.serving",
    "vllm.entrypoints.openai.responses.serving",
    "vllm.parser",
    "vllm.renderers",
    "vllm.tool_parsers",
)


class Adapter:
    """The operations of one engine, one for each endpoint."""

    def __init__(
        self, engine: EngineClient, settings: Settings, endpoints: Sequence[Endpoint]
    ) -> None:
        self.schemas: tuple[dict[str, dict[str, Any]], dict[str, Any]] = ({}, {})
        self._endpoints = endpoints
        self._template_failure: str | None = None
        for vllm_logger in _LOG_CLIENT_MISTAKES:
            logging.getLogger(vllm_logger).setLevel(logging.CRITICAL)
        parts = _parts(engine, settings)
        self.renderer = parts.renderer
        facts = _facts(parts, settings)

        def lost() -> bool:
            return bool(engine.errored)

        made: dict[Callable[[ServingParts], Any], Any] = {}  # serving classes, by what makes them
        self.operations: dict[str, Operation] = {}
        for endpoint in endpoints:
            if endpoint.serving not in made:
                made[endpoint.serving] = endpoint.serving(parts)
            serving, models = made[endpoint.serving], endpoint.models()
            self.operations[endpoint.name] = Operation(
                endpoint,
                partial(_parse, endpoint, models),
                endpoint.call(serving),
                partial(_check, endpoint, models, facts),
                lost,
                self.template_fails,
                _output_limit(endpoint, models, serving, facts.context),
            )

    def warm_up(self) -> None:
        """Try the chat template, and load the tokenizer's caches before the first user."""
        self._try_template()
        self.renderer.warmup()
        self.schemas = request_schemas(self._endpoints)

    def template_fails(self, message: str) -> bool:
        """Whether the chat template failed with this message at start-up."""
        return message == self._template_failure

    def _try_template(self) -> None:
        """Render a plain user message. If the template fails for it, every chat's failure is the
        server's, not the client's. Text completions are served all the same. If the template takes
        one call a turn, turns of several are split."""
        try:
            self._render([{"role": "user", "content": "Hello"}])
        except ChatTemplateResolutionError:  # the model has none: it is not made for chats
            logger.info("the model has no chat template: chats are refused")
        except Exception as error:
            api_error = vllm_errors.from_exception(error, {}, "messages")
            logger.error(
                "the chat template fails for a plain user message, chats get a 500: %s", error
            )
            if api_error.status < 500:
                self._template_failure = api_error.message
        else:
            with_tool = partial(self._render, tools=[TOOL])
            self.renderer.single_calls = takes_single_calls(with_tool)

    def _render(self, messages: list[dict[str, Any]], **kwargs: Any) -> None:
        """Render messages by the chat template, which gets the arguments `kwargs`, too."""
        parameters = ChatParams(
            chat_template=self.renderer.chat_template,
            chat_template_content_format=self.renderer.chat_template_content_format,
            chat_template_kwargs={**self.renderer.default_chat_template_kwargs, **kwargs},
        )
        self.renderer.renderer.render_messages(messages, parameters)


def _parse(endpoint: Endpoint, models: Models, payload: Payload) -> BaseModel:
    return models[endpoint.shape(payload)].model_validate(payload)


def _check(endpoint: Endpoint, models: Models, facts: ModelFacts, payload: Payload) -> None:
    check_request(payload, endpoint, models[endpoint.shape(payload)], facts)


def _parts(engine: EngineClient, settings: Settings) -> ServingParts:
    models = OpenAIServingModels(
        engine_client=engine,
        base_model_paths=[
            BaseModelPath(name=name, model_path=settings.model.model)
            for name in settings.model_names
        ],
    )
    rendering: dict[str, Any] = {
        "chat_template": load_chat_template(settings.model.chat_template),
        "chat_template_content_format": settings.model.chat_template_content_format,
        "default_chat_template_kwargs": settings.model.default_chat_template_kwargs,
    }
    parsing = _parsing(settings, engine.model_config.hf_config.model_type)
    renderer = Renderer(
        model_config=engine.model_config,
        renderer=engine.renderer,
        request_logger=None,
        **rendering,
        **parsing,
    )
    return ServingParts(engine, models, renderer, rendering, parsing)


def _parsing(settings: Settings, model_type: str) -> dict[str, Any]:
    """How answers are read."""
    tools, reasoning = settings.model.parsers(model_type)
    return {
        "enable_auto_tools": tools is not None,
        "tool_parser": tools,
        "tool_strict_level": settings.model.tool_strict_level,
        "reasoning_parser": reasoning or "",
    }


def _facts(parts: ServingParts, settings: Settings) -> ModelFacts:
    engine, renderer = parts.engine, parts.renderer
    return ModelFacts(
        vocabulary=engine.model_config.get_vocab_size(),
        context=engine.model_config.max_model_len,
        text_only=not engine.model_config.is_multimodal_model,
        reads_calls=parts.parsing["enable_auto_tools"]
        or is_mistral_tokenizer(engine.renderer.tokenizer),
        bounds_reasoning=bounds_reasoning(engine),
        limits=settings.limits,
        unknown_tools=settings.model.unknown_tools,
        reports_token_origins=_reports_token_origins(engine, settings),
        any_arguments=renderer.use_harmony,
        call_grammar=_call_grammar(parts),
    )


def _call_grammar(parts: ServingParts) -> CallGrammar:
    tool_parser = getattr(parts.renderer.parser, "tool_parser_cls", None)
    if tool_parser is None:  # nobody reads calls
        return CallGrammar()
    tokenizer, parsing = parts.engine.renderer.tokenizer, parts.parsing
    level = parsing["tool_strict_level"]
    return call_grammar(parsing["tool_parser"], tool_parser, tokenizer, level)


def _output_limit(endpoint: Endpoint, models: Models, serving: Any, context: int) -> OutputLimit:
    """The bounds that vLLM's serving class obeys (vllm/entrypoints/serve/utils/api_utils.py,
    get_max_tokens)."""
    if not endpoint.output_limit:
        return OutputLimit()
    default = models[0].model_fields[endpoint.output_limit[-1]].default
    if not isinstance(default, int):
        default = serving.default_sampling_params.get("max_tokens")
    most = min(bound for bound in (context, serving.override_max_tokens) if bound is not None)
    return OutputLimit(endpoint.output_limit, default, most)


def _reports_token_origins(engine: EngineClient, settings: Settings) -> bool:
    """Whether the engine core reports what was drafted for each output.

    It does where nothing is drafted, and with this project's scheduler
    (drafters/vllm/scheduling/scheduler.py).
    """
    if engine.vllm_config.speculative_config is None:
        return True
    return settings.speculates and settings.speculation.speculation_header
