"""vLLM's request models, without rules that OpenAI's API does not have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, Field, create_model
from vllm.config import ModelConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.parser import Parser
from vllm.renderers import TokenizeParams
from vllm.sampling_params import SamplingParams

Model = TypeVar("Model", bound=BaseModel)

# Most tokens of the context that a prompt is cut to leave free, where its request has no limit of
# the output. Of a short context it is a quarter.
MAX_RESERVE = 4096


def first_error_only(name: str) -> Callable[[type[Model]], type[Model]]:
    """Class decorator: validation of the lists that field `name` takes ends at a bad entry.

    pydantic tries every entry as each of its types and reports all errors of all entries: 1,024
    invalid input items took 3 s, and only the first error is answered.
    """

    def stopping(kind: Any) -> Any:
        return Annotated[kind, Field(fail_fast=True)] if get_origin(kind) is list else kind

    def derive(model: type[Model]) -> type[Model]:
        info = model.model_fields[name]
        kind = info.annotation
        kinds = (kind,) if get_origin(kind) is list else get_args(kind)
        default = ... if info.is_required() else info.default
        fields: dict[str, Any] = {name: (reduce(or_, map(stopping, kinds)), default)}
        return create_model(model.__name__, __base__=model, __doc__=model.__doc__, **fields)

    return derive


class _ManyGreedyChoices:
    """n > 1 at temperature 0: n equal answers, as OpenAI gives.

    SamplingParams refuses the pair when it is built (vllm/sampling_params.py,
    _verify_greedy_sampling) and never looks again, so n is set afterwards. Its upper
    bound is checked in app/validation/field_checks.py.
    """

    n: int | None

    def to_sampling_params(self, max_tokens: int, defaults: dict[str, Any]) -> SamplingParams:
        """Make the sampling parameters as vLLM does, for any n."""
        choices, self.n = self.n or 1, 1
        params: SamplingParams = super().to_sampling_params(max_tokens, defaults)  # type: ignore[misc]
        self.n = params.n = choices
        return params


class _CutToFit:
    """A prompt that is to be cut to the context leaves room for the output.

    vLLM leaves one token of the context, or none where the request has no limit of its output.
    """

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        """Make the parameters as vLLM does, with room for the output: for its limit, but at most
        for half of the context."""
        params: TokenizeParams = super().build_tok_params(model_config)  # type: ignore[misc]
        if params.truncate_prompt_tokens != -1:
            return params
        context = model_config.max_model_len
        room = min(MAX_RESERVE, context // 4)
        if params.max_output_tokens:
            room = min(params.max_output_tokens, context // 2)
        elif isinstance(self, CompletionRequest):
            room = 1  # an echo alone: the engine takes a step for it
        return replace(params, truncate_prompt_tokens=context - max(1, room))


@first_error_only("messages")
class ChatRequest(_CutToFit, _ManyGreedyChoices, ChatCompletionRequest):
    """Body of POST /v1/chat/completions."""

    def resolve_reasoning_ended(
        self, parser: Parser | None, prompt_token_ids: list[int]
    ) -> bool | None:
        """Say whether the model's reasoning ended in the prompt, as vLLM does where the answer has
        the reasoning.

        Without `include_reasoning` vLLM says that it did, and holds the reasoning to the grammar of
        the answer: the parser takes all of it for reasoning, and the answer is empty.
        """
        included, self.include_reasoning = self.include_reasoning, True  # type: ignore[has-type]
        ended: bool | None = super().resolve_reasoning_ended(parser, prompt_token_ids)
        self.include_reasoning = included
        return ended


@first_error_only("prompt")
class TextRequest(_CutToFit, _ManyGreedyChoices, CompletionRequest):
    """Body of POST /v1/completions."""

    def to_sampling_params(self, max_tokens: int, defaults: dict[str, Any]) -> SamplingParams:
        """Make the sampling parameters as vLLM does, `max_tokens` 0 for an echo without output.

        vLLM would generate, and count, one token for it. GatewayLLM takes 0.
        """
        params = super().to_sampling_params(max_tokens, defaults)
        if self.echo and self.max_tokens == 0:
            params.max_tokens = 0
        return params


@first_error_only("input")
class ItemsRequest(_CutToFit, ResponsesRequest):
    """Body of POST /v1/responses."""


class _WithinContext:
    """A text to tokenise that must fit into the context, as a prompt must.

    vLLM's own models set no limit: 16 MiB of text held the gateway for a minute.
    """

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        """Make the parameters as vLLM does, with the context as the limit.

        Longer texts are refused, most of them before any work.
        """
        params: TokenizeParams = super().build_tok_params(model_config)  # type: ignore[misc]
        return replace(params, max_total_tokens=model_config.max_model_len)


class TokenizeTextRequest(_WithinContext, TokenizeCompletionRequest):
    """Body of POST /tokenize with a prompt."""


class TokenizeMessagesRequest(_WithinContext, TokenizeChatRequest):
    """Body of POST /tokenize with messages."""
