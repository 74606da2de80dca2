"""Beam search: what vLLM's answers to it would lack, and searches that would be too large."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import BeamSearchParams

from app.llm.answer_logprobs import Alternatives
from app.llm.async_llm import refuse_too_many_repeats
from app.llm.vllm_errors import PROMPT_FILLS_CONTEXT
from app.request_usage import begin_beam_search, current_usage
from app.validation.fields import MAX_BEAM_TOKENS


class BeamSearchCorrections:
    """Mixin in front of vLLM's serving classes that search with beams."""

    def beam_search(
        self, prompt: Any, request_id: str, params: BeamSearchParams, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """The best beams, whose prompt is charged once, with log probabilities of their own tokens.

        Raises VLLMValidationError, before anything is searched, if their texts may be too long, or
        if the prompt leaves no room for them.
        """
        if params.max_tokens < 1:
            raise VLLMValidationError(PROMPT_FILLS_CONTEXT, parameter="prompt")
        tokens = params.beam_width * params.max_tokens
        if tokens > MAX_BEAM_TOKENS:
            raise VLLMValidationError(
                f"With 'use_beam_search', 'n' times the limit of the output must be at most "
                f"{MAX_BEAM_TOKENS}, got {tokens}: send a smaller 'n' or 'max_tokens'.",
                parameter="max_tokens",
            )
        if (usage := current_usage()) is not None:
            refuse_too_many_repeats(usage, prompt, params.beam_width)
        outputs = super().beam_search(prompt, request_id, params, *args, **kwargs)  # type: ignore[misc]
        return _corrected_beams(outputs)


async def _corrected_beams(
    outputs: AsyncGenerator[RequestOutput, None],
) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of a beam search. The engine sampled a token of its own at each step, from which
    the search went on with others."""
    begin_beam_search()
    async with aclosing(outputs):
        async for output in outputs:
            for choice in output.outputs:
                if choice.logprobs is not None:
                    choice.logprobs = _of_beam(choice)
            yield output


def _of_beam(choice: Any) -> list[Alternatives]:
    """The alternatives of each position of a beam's text, which ends before its end token."""
    tokens = list(choice.token_ids)
    if tokens and tokens[-1] == choice.stop_reason:
        tokens.pop()
    return [Alternatives(token, step) for token, step in zip(tokens, choice.logprobs, strict=False)]
