"""vLLM's renderer of prompts, corrected, most of all for the Harmony format of gpt-oss."""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import should_continue_final_message
from vllm.exceptions import VLLMValidationError
from vllm.renderers.online_renderer import OnlineRenderer, ResponsesRenderResult

from app.serving.parsers.consistent import consistent
from app.serving.parsers.harmony import continued
from app.serving.single_calls import with_single_calls


class Renderer(OnlineRenderer):
    """OnlineRenderer (vllm/renderers/online_renderer.py) as the gateway uses it.

    With `tool_choice` "none" the prompt names no tools: nothing else keeps the model from calls.
    Turns of several calls are split for a template that takes one call a turn (`single_calls`).
    Grammars of calls are those of this project's parsers. What else is corrected, for models of the
    Harmony format only:

    - Prompts of chats are cut as `truncate_prompt_tokens` says.
    - The assistant's message at the end is continued where that is asked for.
    - What vLLM passes over without a word is refused: in Responses `stop` and `include_reasoning`
      false.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = consistent(self.parser)  # type: ignore[has-type]
        self.exclude_tools_when_tool_choice_none = True
        self.single_calls = False

    async def preprocess_chat(self, request: Any, messages: Any, *args: Any, **kwargs: Any) -> Any:
        """The conversation and its prompt."""
        if self.single_calls:
            messages = with_single_calls(messages)
        return await super().preprocess_chat(request, messages, *args, **kwargs)

    def _make_request_with_harmony(
        self, request: ChatCompletionRequest, should_include_tools: bool = True
    ) -> Any:
        messages, prompts = super()._make_request_with_harmony(request, should_include_tools)
        limits = request.build_tok_params(self.model_config)
        for prompt in prompts:
            if request.continue_final_message:
                _continue(prompt, request, "messages")
            limits.apply_post_tokenization(self.renderer.tokenizer, prompt)
        return messages, prompts

    def _render_responses_with_harmony(self, request: ResponsesRequest, **kwargs: Any) -> Any:
        if request.stop:
            raise VLLMValidationError(
                "This model's answers cannot end at a stop string in Responses: leave out 'stop', "
                "or use chat completions.",
                parameter="stop",
            )
        if not request.include_reasoning:
            raise VLLMValidationError(
                "This model's reasoning cannot be left out in Responses: leave out "
                "'include_reasoning', or use chat completions.",
                parameter="include_reasoning",
            )
        tools = request.tools
        if request.tool_choice == "none":
            request.tools = []
        try:
            result = super()._render_responses_with_harmony(request, **kwargs)
        finally:
            request.tools = tools
        if isinstance(result, ResponsesRenderResult) and should_continue_final_message(
            request.input
        ):
            _continue(result.engine_input, request, "input")
        return result


def _continue(prompt: Any, request: ChatCompletionRequest | ResponsesRequest, field: str) -> None:
    """Open the prompt's last message. Raises VLLMValidationError if the answer would be held to a
    grammar, which begins with the header of a message, or if another message is the last one."""
    if request.structured_outputs is not None:
        raise VLLMValidationError(
            "This model cannot continue an answer that is held to a format or to tools.",
            parameter=field,
        )
    try:
        prompt["prompt_token_ids"] = continued(prompt["prompt_token_ids"])
    except ValueError:
        raise VLLMValidationError(
            "This model can continue only an answer of the assistant that has text.",
            parameter=field,
        ) from None
