"""vLLM's class for Responses, with corrected statuses and log probabilities of the content only."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, Literal

from pydantic import BaseModel
from vllm.entrypoints.openai.responses import streaming_events
from vllm.entrypoints.openai.responses import utils as responses_utils
from vllm.entrypoints.openai.responses.context import SimpleContext
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import VLLMValidationError

from app.llm.answer_logprobs import chosen_tokens
from app.serving.classes.call_arguments import ends_early, is_stop
from app.serving.classes.custom_tool_input import custom_input, custom_input_so_far
from app.serving.classes.response_logprobs import StreamedLogprobs, keep_content_logprobs
from app.serving.parsers.consistent import consistent

responses_utils.decode_custom_tool_input = custom_input
streaming_events.decode_custom_tool_input = custom_input
streaming_events.decode_custom_tool_input_prefix = custom_input_so_far

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
        if (error := self._validate_create_responses_input(request)) is not None:
            return error
        rendered = await self._render_resolved_response_inputs(request, None, skip_mm_cache=True)
        if isinstance(rendered, ErrorResponse):
            return rendered
        if (error := self._validate_generator_input(rendered.engine_input)) is not None:
            return error
        tokens = self._extract_prompt_len(rendered.engine_input)
        room = self.model_config.max_model_len - tokens
        # It raises an error for values that are out of bounds.
        request.to_sampling_params(room, self.default_sampling_params)
        return InputTokens(input_tokens=tokens)

    def _validate_create_responses_input(self, request: ResponsesRequest) -> ErrorResponse | None:
        """What vLLM refuses of a request, by the names that were sent."""
        if self.use_harmony and request.is_include_output_logprobs():
            name = "top_logprobs" if request.top_logprobs else "include"
            raise VLLMValidationError(
                "This model's answers have no log probabilities in Responses: leave them out of "
                f"'{name}', or use chat completions.",
                parameter=name,
            )
        return super()._validate_create_responses_input(request)

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
        if ends_early(calls[-1].arguments, stopped=stopped):
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
