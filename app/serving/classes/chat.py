"""vLLM's class for chat completions, with corrected finish reasons, token origins and log
probabilities."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.outputs import RequestOutput

from app.llm.answer_logprobs import chosen_tokens
from app.llm.token_origins import origins_of
from app.serving.classes.beam_search import BeamSearchCorrections
from app.serving.classes.cached_tokens import correct_cached_tokens, with_cached_tokens
from app.serving.classes.call_arguments import is_object, is_stop
from app.serving.classes.streamed_chunks import StreamedCalls, StreamedOrigins, split
from app.serving.parsers.consistent import consistent


class ChatCorrections(BeamSearchCorrections):
    """Mixin in front of vLLM's chat serving classes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser_cls = consistent(self.parser_cls)  # type: ignore[has-type]

    def _create_chat_logprobs(
        self, token_ids: Sequence[int], top_logprobs: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Log probabilities of the positions that belong to the text."""
        tokens = chosen_tokens(top_logprobs, token_ids)
        return super()._create_chat_logprobs(tokens, top_logprobs, *args, **kwargs)  # type: ignore[misc]

    async def chat_completion_full_generator(
        self,
        request: ChatCompletionRequest,
        result_generator: AsyncIterator[RequestOutput],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The whole answer, with the finish reasons of the stream.

        vLLM says `tool_calls` also for calls that the limit, a stop string or a stop token cut, and
        for no call at all where one was required.
        """
        reasons: dict[int, str | None] = {}
        origins: dict[int, Any] = {}

        async def watched() -> AsyncIterator[RequestOutput]:
            async for output in result_generator:
                for choice in output.outputs:
                    reasons[choice.index] = choice.finish_reason
                    origins[choice.index] = origins_of(choice)
                yield output

        response = await super().chat_completion_full_generator(  # type: ignore[misc]
            request, watched(), *args, **kwargs
        )
        if not isinstance(response, ChatCompletionResponse):
            return response
        correct_cached_tokens(response.usage)
        named = isinstance(request.tool_choice, ChatCompletionNamedToolChoiceParam)
        for choice in response.choices:
            reason = reasons.get(choice.index) or "stop"
            calls = choice.message.tool_calls or ()
            called = bool(calls)
            cut = is_stop(choice.stop_reason, request.stop_token_ids) and any(
                not is_object(call.function.arguments) for call in calls[-1:]
            )
            choice.finish_reason = (
                "tool_calls" if called and reason == "stop" and not named and not cut else reason
            )
            if not called and choice.message.content is None:
                choice.message.content = ""  # a stream begins with it, and history needs it
            if (told := origins.get(choice.index)) is not None:
                choice.speculation = told
        return response

    async def chat_completion_stream_generator(
        self,
        request: ChatCompletionRequest,
        result_generator: AsyncIterator[RequestOutput],
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[str, None]:
        """The stream; its chunks have token origins, if the request asked for them. Calls that the
        request's stop cut end with `stop`, as those of a whole answer do."""
        origins, calls = StreamedOrigins(), StreamedCalls(request.stop_token_ids)
        stops = request.stop or request.stop_token_ids

        async def watched() -> AsyncIterator[RequestOutput]:
            async for output in result_generator:
                for choice in output.outputs:
                    origins.add(choice.index, choice)
                yield output

        async for event in super().chat_completion_stream_generator(  # type: ignore[misc]
            request, watched(), *args, **kwargs
        ):
            event = calls.corrected(event) if stops else event
            yield with_cached_tokens(origins.told_with(event))


class ChatServing(ChatCorrections, OpenAIServingChat):
    """vLLM's class for POST /v1/chat/completions, corrected."""

    async def chat_completion_stream_generator(
        self, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[str, None]:
        """The stream. No chunk has both text and calls."""
        async for event in super().chat_completion_stream_generator(*args, **kwargs):
            for part in split(event):
                yield part
