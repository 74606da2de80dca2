"""vLLM's class for text completions, with token origins and log probabilities of the text only."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from vllm.entrypoints.openai.completion.protocol import CompletionResponse
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.outputs import RequestOutput

from app.llm.answer_logprobs import chosen_tokens
from app.llm.token_origins import origins_of
from app.serving.classes.beam_search import BeamSearchCorrections
from app.serving.classes.cached_tokens import correct_cached_tokens, with_cached_tokens
from app.serving.classes.streamed_chunks import StreamedOrigins


class TextServing(BeamSearchCorrections, OpenAIServingCompletion):
    """vLLM's class for POST /v1/completions, corrected."""

    def _create_completion_logprobs(
        self, token_ids: Sequence[int], top_logprobs: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Log probabilities of the positions that belong to the text."""
        tokens = chosen_tokens(top_logprobs, token_ids)
        return super()._create_completion_logprobs(tokens, top_logprobs, *args, **kwargs)

    async def completion_stream_generator(
        self,
        request: Any,
        engine_inputs: Any,
        result_generator: AsyncIterator[tuple[int, RequestOutput]],
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[str, None]:
        """The stream; its chunks have token origins, if the request asked for them."""
        origins, choices = StreamedOrigins(), request.n or 1

        async def watched() -> AsyncIterator[tuple[int, RequestOutput]]:
            async for prompt, output in result_generator:
                for choice in output.outputs:
                    origins.add(choice.index + prompt * choices, choice)
                yield prompt, output

        async for event in super().completion_stream_generator(
            request, engine_inputs, watched(), *args, **kwargs
        ):
            yield with_cached_tokens(origins.told_with(event))

    def request_output_to_completion_response(
        self, final_res_batch: list[RequestOutput], *args: Any, **kwargs: Any
    ) -> CompletionResponse:
        """The whole answer; its choices have token origins, if the request asked for them."""
        response: CompletionResponse = super().request_output_to_completion_response(
            final_res_batch, *args, **kwargs
        )
        correct_cached_tokens(response.usage)
        ended = [choice for output in final_res_batch for choice in output.outputs]
        for choice, output in zip(response.choices, ended, strict=True):
            if (told := origins_of(output)) is not None:
                choice.speculation = told
        return response
