"""vLLM's classes for Anthropic's Messages, with calls that were cut and turns that go on."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.outputs import RequestOutput

from app.serving.classes.cached_tokens import with_first_cached_tokens
from app.serving.classes.call_arguments import is_object, partial_object
from app.serving.classes.chat import ChatCorrections
from app.serving.parsers.consistent import bounds_reasoning
from app.validation.replay import object_arguments


class MessagesServing(ChatCorrections, AnthropicServingMessages):
    """vLLM's class for POST /v1/messages, corrected."""

    async def create_messages(self, request: Any, raw_request: Any = None) -> Any:
        """The answer. Where nobody sees the end of reasoning, its budget is left out: the engine
        would refuse it."""
        asks = getattr(request.thinking, "type", None) == "enabled"
        if asks and not bounds_reasoning(self.engine_client):
            request.thinking = None
        return await super().create_messages(request, raw_request)

    @classmethod
    def to_chat_completion_request(
        cls, anthropic_request: Any, **kwargs: Any
    ) -> ChatCompletionRequest:
        """The chat request. An assistant's turn at the end is continued, as Anthropic does, and
        without tools no text is taken for a call."""
        request: ChatCompletionRequest = super().to_chat_completion_request(
            anthropic_request, **kwargs
        )
        if not request.tools:  # an empty list would have templates ask for calls
            request.tools, request.tool_choice = None, "none"
        last: dict[str, Any] = request.messages[-1] if request.messages else {}
        if last.get("role") != "assistant" or last.get("tool_calls"):
            return request
        content = last.get("content")
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content)
        if not content:
            if "reasoning" not in last:
                request.messages.pop()  # an empty turn: the model begins it
            return request
        last["content"] = content
        request.add_generation_prompt, request.continue_final_message = False, True
        return request

    async def chat_completion_stream_generator(
        self,
        request: ChatCompletionRequest,
        result_generator: AsyncIterator[RequestOutput],
        *args: Any,
        **kwargs: Any,
    ) -> AsyncGenerator[str, None]:
        """The stream. Its first chunk counts the prompt's cached tokens as the last one does: the
        engine's first output says how many there are."""
        first: RequestOutput | None = None

        async def watched() -> AsyncIterator[RequestOutput]:
            nonlocal first
            async for output in result_generator:
                first = first or output
                yield output

        begun = False
        async for event in super().chat_completion_stream_generator(
            request, watched(), *args, **kwargs
        ):
            yield event if begun or first is None else with_first_cached_tokens(event, first)
            begun = True

    def messages_full_converter(self, generator: Any) -> AnthropicMessagesResponse:
        """The whole answer. The `input` of a call that was cut holds its complete members, as
        Anthropic's clients read partial JSON; other text that is no object is shown as it is."""
        choice = generator.choices[0]
        cut = choice.finish_reason == "length" or isinstance(choice.stop_reason, str)
        complete = True
        calls = list(choice.message.tool_calls or ())
        for call in calls:
            arguments = call.function.arguments
            partial: dict[str, Any] | None = None
            complete = is_object(arguments)
            if cut and call is calls[-1] and not complete:
                partial = partial_object(arguments)
            call.function.arguments = (
                object_arguments(arguments) if partial is None else json.dumps(partial)
            )
        response: AnthropicMessagesResponse = super().messages_full_converter(generator)
        if (
            not complete
            and choice.finish_reason != "length"
            and isinstance(choice.stop_reason, str)
        ):
            response.stop_reason, response.stop_sequence = "stop_sequence", choice.stop_reason
        return response


class MessageCountServing(MessagesServing):
    """vLLM's class for POST /v1/messages/count_tokens, corrected."""

    async def render_chat_request(self, request: ChatCompletionRequest) -> Any:
        """The prompt. Media stay out of the cache that mirrors the engine's, which would not get
        them: a later message with the same picture would be refused by the engine. Tools are
        counted also where nobody reads calls, which vLLM refuses for any choice of them."""
        reads_calls = getattr(self.parser_cls, "tool_parser_cls", None) is not None
        if not reads_calls and request.tool_choice != "none":
            request.tool_choice = None
        if (error := await self._check_model(request)) is not None:
            return error
        self._preflight()
        return await self.online_renderer.render_chat(request, skip_mm_cache=True)
