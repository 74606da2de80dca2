"""vLLM's request models without the rules of theirs that OpenAI does not have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.config import ModelConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.renderers import TokenizeParams
from vllm.sampling_params import SamplingParams


class _ManyGreedyChoices:
    """n > 1 at temperature 0: n equal answers, as OpenAI gives.

    SamplingParams refuses the pair when it is built (vllm/sampling_params.py,
    _verify_greedy_sampling) and never looks again, so n is set afterwards. Its upper
    bound is checked in app/engine/strict.py.
    """

    n: int | None

    def to_sampling_params(self, max_tokens: int, defaults: dict[str, Any]) -> SamplingParams:
        """As vLLM's, for any n."""
        choices, self.n = self.n or 1, 1
        params: SamplingParams = super().to_sampling_params(max_tokens, defaults)  # type: ignore[misc]
        self.n = params.n = choices
        return params


class ChatRequest(_ManyGreedyChoices, ChatCompletionRequest):
    """Body of POST /v1/chat/completions."""


class TextRequest(_ManyGreedyChoices, CompletionRequest):
    """Body of POST /v1/completions."""

    def to_sampling_params(self, max_tokens: int, defaults: dict[str, Any]) -> SamplingParams:
        """As vLLM's, but an echo without output says so: vLLM generates, and counts, one
        token for it. GatewayLLM knows what 0 means."""
        params = super().to_sampling_params(max_tokens, defaults)
        if self.echo and self.max_tokens == 0:
            params.max_tokens = 0
        return params


class _WithinContext:
    """A text to tokenise that must fit into the context, as a prompt must.

    vLLM's own models set no limit: 16 MiB of text held the gateway for a minute.
    """

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        """As vLLM's, with the limit: longer texts are refused, most of them before any work."""
        params: TokenizeParams = super().build_tok_params(model_config)  # type: ignore[misc]
        return replace(params, max_total_tokens=model_config.max_model_len)


class TokenizeTextRequest(_WithinContext, TokenizeCompletionRequest):
    """Body of POST /tokenize with a prompt."""


class TokenizeMessagesRequest(_WithinContext, TokenizeChatRequest):
    """Body of POST /tokenize with messages."""
