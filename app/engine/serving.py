"""vLLM's serving classes for chat and messages, corrected where they do not tell the truth."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from pydantic_core import from_json
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.outputs import RequestOutput

from app.engine.parsers import consistent


class _ChatCorrections:
    """Mixed into vLLM's chat serving classes, in front of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser_cls = consistent(self.parser_cls)  # type: ignore[has-type]

    async def chat_completion_full_generator(
        self,
        request: ChatCompletionRequest,
        result_generator: AsyncIterator[RequestOutput],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The whole answer; its finish reasons are those of the stream. vLLM says `tool_calls`
        of calls that the limit cut, and of none at all where a call was required."""
        reasons: dict[int, str | None] = {}

        async def watched() -> AsyncIterator[RequestOutput]:
            async for output in result_generator:
                reasons.update((choice.index, choice.finish_reason) for choice in output.outputs)
                yield output

        response = await super().chat_completion_full_generator(  # type: ignore[misc]
            request, watched(), *args, **kwargs
        )
        if not isinstance(response, ChatCompletionResponse):
            return response
        named = isinstance(request.tool_choice, ChatCompletionNamedToolChoiceParam)
        for choice in response.choices:
            reason = reasons.get(choice.index) or "stop"
            called = bool(choice.message.tool_calls)
            choice.finish_reason = (
                "tool_calls" if called and reason == "stop" and not named else reason
            )
            if not called and choice.message.content is None:
                choice.message.content = ""  # a stream begins with it, and history needs it
        return response


class ChatServing(_ChatCorrections, OpenAIServingChat):
    """POST /v1/chat/completions."""


class MessagesServing(_ChatCorrections, AnthropicServingMessages):
    """POST /v1/messages."""

    @classmethod
    def to_chat_completion_request(
        cls, anthropic_request: Any, **kwargs: Any
    ) -> ChatCompletionRequest:
        """The chat request. An assistant's turn at the end is continued, as Anthropic does, and
        without tools no text is taken for a call."""
        request: ChatCompletionRequest = super().to_chat_completion_request(
            anthropic_request, **kwargs
        )
        if not request.tools:
            request.tool_choice = "none"
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

    def messages_full_converter(self, generator: Any) -> AnthropicMessagesResponse:
        """The whole answer. Of a call that was cut, `input` holds what is complete, as
        Anthropic's clients read partial JSON."""
        choice = generator.choices[0]
        complete = True
        for call in choice.message.tool_calls or ():
            complete = _is_object(call.function.arguments)
            if not complete:
                call.function.arguments = json.dumps(_partial_object(call.function.arguments))
        response: AnthropicMessagesResponse = super().messages_full_converter(generator)
        if (
            not complete
            and choice.finish_reason != "length"
            and isinstance(choice.stop_reason, str)
        ):
            response.stop_reason, response.stop_sequence = "stop_sequence", choice.stop_reason
        return response


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def _partial_object(text: str) -> dict[str, Any]:
    """The complete members of an object that ends early."""
    try:
        value = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
