"""vLLM's serving classes that generate, with corrected finish reasons and tool calls, with token
origins (app/llm/token_origins.py), and with log probabilities of the answer's text only
(app/llm/answer_logprobs.py)."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import from_json
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionResponse
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses import streaming_events
from vllm.entrypoints.openai.responses import utils as responses_utils
from vllm.entrypoints.openai.responses.context import SimpleContext
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import BeamSearchParams
from vllm.tool_parsers.utils import CUSTOM_TOOL_INPUT_KEY

from app.llm.answer_logprobs import Alternatives, chosen_tokens
from app.llm.async_llm import refuse_too_many_repeats
from app.llm.token_origins import origins_of
from app.llm.vllm_errors import PROMPT_FILLS_CONTEXT
from app.request_usage import begin_beam_search, current_usage
from app.serving.parsers import consistent
from app.serving.response_logprobs import StreamedLogprobs, keep_content_logprobs
from app.serving.streamed_chunks import (
    StreamedCalls,
    StreamedOrigins,
    is_object,
    is_stop,
    with_cached_tokens,
    with_first_cached_tokens,
)
from app.validation.fields import MAX_BEAM_TOKENS
from app.validation.replay import object_arguments


class _BeamSearchCorrections:
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


class _ChatCorrections(_BeamSearchCorrections):
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
        _correct_cached_tokens(response.usage)
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


class ChatServing(_ChatCorrections, OpenAIServingChat):
    """vLLM's class for POST /v1/chat/completions, corrected."""


class TextServing(_BeamSearchCorrections, OpenAIServingCompletion):
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
        _correct_cached_tokens(response.usage)
        ended = [choice for output in final_res_batch for choice in output.outputs]
        for choice, output in zip(response.choices, ended, strict=True):
            if (told := origins_of(output)) is not None:
                choice.speculation = told
        return response


def _correct_cached_tokens(usage: Any) -> None:
    """Say in a whole answer's usage how many tokens of all its prompts were cached: vLLM takes one
    prompt's, and of several choices one that found what another had just left."""
    ours = current_usage()
    cached = None if ours is None else ours.cached_tokens
    details = usage.prompt_tokens_details
    if cached is not None and details is not None and details.cached_tokens is not None:
        details.cached_tokens = cached


_HALF_A_PAIR = re.compile(r"[\ud800-\udfff]")


_decode_input = responses_utils.decode_custom_tool_input
_decode_input_so_far = responses_utils.decode_custom_tool_input_prefix


def _custom_input(arguments: str) -> str:
    """The `input` of a custom tool's call; of arguments that end early, what has come of it, as
    streamed. vLLM would hand out their JSON."""
    members = None if is_object(arguments) else _partial_object(arguments)
    if members is not None and members.keys() <= {CUSTOM_TOOL_INPUT_KEY}:
        return _custom_input_so_far(arguments)
    return _HALF_A_PAIR.sub("\ufffd", _decode_input(arguments))


def _custom_input_so_far(arguments: str) -> str:
    """The `input` in the beginning of a call's arguments. Here and above a replacement character
    stands for half of a surrogate pair, which no answer can hold."""
    return _HALF_A_PAIR.sub("\ufffd", _decode_input_so_far(arguments))


responses_utils.decode_custom_tool_input = _custom_input
streaming_events.decode_custom_tool_input = _custom_input
streaming_events.decode_custom_tool_input_prefix = _custom_input_so_far


_CALLS = ("function_call", "custom_tool_call")


class InputTokens(BaseModel):
    """The answer of POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponsesServing(OpenAIServingResponses):
    """vLLM's class for POST /v1/responses, corrected."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = consistent(self.parser)  # type: ignore[has-type]

    async def count_input_tokens(self, request: ResponsesRequest) -> InputTokens | ErrorResponse:
        """The number of tokens of a response's prompt, by the steps of `create_responses` up to the
        engine. Media stay out of the cache that mirrors the engine's, which would not get them."""
        if (error := await self._check_model(request)) is not None:
            return error
        rendered = await self._render_resolved_response_inputs(request, None, skip_mm_cache=True)
        if isinstance(rendered, ErrorResponse):
            return rendered
        if (error := self._validate_generator_input(rendered.engine_input)) is not None:
            return error
        return InputTokens(input_tokens=self._extract_prompt_len(rendered.engine_input))

    def _create_response_logprobs(
        self, token_ids: Sequence[int], logprobs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Log probabilities of the positions that belong to the text."""
        tokens = chosen_tokens(logprobs, token_ids)
        return super()._create_response_logprobs(tokens, logprobs, *args, **kwargs)

    def _make_response_output_items(
        self, request: Any, final_output: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """The items of a whole answer, with log probabilities of its content. Reasoning has a
        status, as in a stream."""
        items = super()._make_response_output_items(request, final_output, *args, **kwargs)
        for item in items:
            if item.type == "reasoning":
                item.status = "completed"
        if final_output.logprobs:
            keep_content_logprobs(items, final_output.text, final_output.logprobs)
        return items

    async def responses_full_generator(
        self,
        request: Any,
        sampling_params: Any,
        result_generator: Any,
        context: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The whole answer, or what a stream ends with. A call that ends early is `incomplete`;
        vLLM says `completed`."""
        response = await super().responses_full_generator(
            request, sampling_params, result_generator, context, *args, **kwargs
        )
        if not isinstance(response, ResponsesResponse) or not isinstance(context, SimpleContext):
            return response
        items = [item for item in response.output if item.type in _CALLS]
        calls = context.response_parser.calls() if items else []
        if not items or len(items) < len(calls):  # vLLM left the last ones out
            return response
        stop = context.final_output.outputs[0].stop_reason
        stopped = is_stop(stop, request.stop_token_ids)
        if _ends_early(calls[-1].arguments, stopped=stopped):
            items[-1].status = "incomplete"
        return response

    async def _process_simple_streaming_events(
        self,
        request: Any,
        sampling_params: Any,
        result_generator: AsyncIterator[Any],
        context: Any,
        model_name: str,
        tokenizer: Any,
        *args: Any,
    ) -> AsyncGenerator[Any, None]:
        """The events of a stream, with all log probabilities of its content.

        vLLM numbers events as it makes them: those here are numbered anew.
        """
        make = super()._process_simple_streaming_events
        # As in a whole answer, which has none without its reasoning.
        shown = request.include_reasoning or context.response_parser is None
        if not (shown and request.is_include_output_logprobs()):
            async for event in make(
                request, sampling_params, result_generator, context, model_name, tokenizer, *args
            ):
                yield event
            return
        streamed = StreamedLogprobs()

        async def watched() -> AsyncIterator[Any]:
            async for each in result_generator:
                for output in each.last_output.outputs if each.last_output else ():
                    steps, output.logprobs = output.logprobs or [], []
                    logprobs = self._create_response_logprobs(
                        output.token_ids, steps, tokenizer, request.top_logprobs
                    )
                    streamed.log.add(output.text, steps, logprobs)
                yield each

        *others, number = args
        async for event in make(
            request, sampling_params, watched(), context, model_name, tokenizer, *others,
            lambda event: event,
        ):  # fmt: skip
            for each in streamed.complete(event):
                yield number(each)


class MessagesServing(_ChatCorrections, AnthropicServingMessages):
    """vLLM's class for POST /v1/messages, corrected."""

    def __init__(self, *args: Any, reasoning_parser: str, **kwargs: Any) -> None:
        super().__init__(*args, reasoning_parser=reasoning_parser, **kwargs)
        self._reads_reasoning = bool(reasoning_parser)

    async def create_messages(self, request: Any, raw_request: Any = None) -> Any:
        """The answer. Where nobody sees the end of reasoning, its budget is left out: the engine
        would refuse it."""
        if not self._reads_reasoning and getattr(request.thinking, "type", None) == "enabled":
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
                partial = _partial_object(arguments)
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
        them: a later message with the same picture would be refused by the engine."""
        if (error := await self._check_model(request)) is not None:
            return error
        self._preflight()
        return await self.online_renderer.render_chat(request, skip_mm_cache=True)


def _ends_early(arguments: str, *, stopped: bool) -> bool:
    """Whether arguments of a call are not whole: `stopped`, or the beginning of an object."""
    return not is_object(arguments) and (stopped or _partial_object(arguments) is not None)


def _partial_object(text: str) -> dict[str, Any] | None:
    """The complete members of an object that ends early; None for text that begins no object."""
    try:
        value = from_json(text, allow_partial=True)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
