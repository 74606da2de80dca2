"""vLLM's renderer of prompts, corrected, most of all for the Harmony format of gpt-oss."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from openai.types.shared import Reasoning
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.parser.harmony_utils import REASONING_EFFORT
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import should_continue_final_message
from vllm.exceptions import VLLMValidationError
from vllm.renderers.online_renderer import OnlineRenderer, ResponsesRenderResult

from app.serving.parsers.consistent import consistent
from app.serving.parsers.harmony import continued
from app.serving.single_calls import with_single_calls

logger = logging.getLogger(__name__)

_EFFORT = "reasoning_effort"
_EFFORTS = tuple(REASONING_EFFORT)
_LEVELS = "low, medium or high"


class Renderer(OnlineRenderer):
    """OnlineRenderer (vllm/renderers/online_renderer.py) as the gateway uses it.

    With `tool_choice` "none" the prompt names no tools: nothing else keeps the model from calls.
    Turns of several calls are split for a template that takes one call a turn (`single_calls`).
    Grammars of calls are those of this project's parsers. What else is corrected, for models of the
    Harmony format only:

    - Prompts of chats are cut as `truncate_prompt_tokens` says.
    - The assistant's message at the end is continued where that is asked for.
    - POST /tokenize has the prompt of chats.
    - `reasoning_effort` is read in `chat_template_kwargs`, too. What vLLM passes over without a
      word is refused: other arguments of a template, `documents`, and in Responses `stop` and
      `include_reasoning` false.
    - In Responses text in front of a call is commentary, as in chats, and no answer; fields that
      cannot be honoured are refused by the names that were sent.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = consistent(self.parser)  # type: ignore[has-type]
        self.exclude_tools_when_tool_choice_none = True
        self.single_calls = False
        if self.use_harmony:
            _warn_of_unread(self.default_chat_template_kwargs)

    async def preprocess_chat(self, request: Any, messages: Any, *args: Any, **kwargs: Any) -> Any:
        """The conversation and its prompt. A request for the Harmony format is one of POST
        /tokenize: the others do not come here."""
        if self.use_harmony:
            chat = ChatCompletionRequest.model_construct(
                messages=messages,
                tools=request.tools,
                chat_template_kwargs=request.chat_template_kwargs,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
            )
            return self._make_request_with_harmony(chat, request.tools is not None)
        if self.single_calls:
            messages = with_single_calls(messages)
        return await super().preprocess_chat(request, messages, *args, **kwargs)

    def _make_request_with_harmony(
        self, request: ChatCompletionRequest, should_include_tools: bool = True
    ) -> Any:
        if request.documents:
            raise VLLMValidationError(
                "This model takes no documents: put them into a message.", parameter="documents"
            )
        if not (request.add_generation_prompt or request.continue_final_message):
            raise VLLMValidationError(
                "This model's prompts end where its answer begins: leave out "
                "'add_generation_prompt', or continue the last message.",
                parameter="add_generation_prompt",
            )
        request.reasoning_effort = self._effort(request, request.reasoning_effort)
        messages, prompts = super()._make_request_with_harmony(request, should_include_tools)
        limits = request.build_tok_params(self.model_config)
        for prompt in prompts:
            if request.continue_final_message:
                _continue(prompt, request, "messages")
            limits.apply_post_tokenization(self.renderer.tokenizer, prompt)
        return messages, prompts

    def _render_responses_with_harmony(self, request: ResponsesRequest, **kwargs: Any) -> Any:
        _refuse_unheard(request)
        effort = request.reasoning.effort if request.reasoning else None
        sent = request.tools, request.reasoning  # which the answer repeats
        request.reasoning = Reasoning(effort=self._effort(request, effort))
        if request.tool_choice == "none":
            request.tools = []
        try:
            result = super()._render_responses_with_harmony(request, **kwargs)
        finally:
            request.tools, request.reasoning = sent
        if isinstance(result, ResponsesRenderResult) and should_continue_final_message(
            request.input
        ):
            _continue(result.engine_input, request, "input")
        return result

    def render_responses_harmony_messages(self, messages: list[Any], **kwargs: Any) -> Any:
        """The prompt of these messages. What the assistant says before a call of the same turn is
        commentary. vLLM takes it for an answer, and leaves out all reasoning in front of one."""
        before_call = False
        for message in reversed(messages):
            if message.author.role != "assistant":
                before_call = False
            elif message.recipient is not None:
                before_call = True
            elif before_call and message.channel == "final":
                message.channel = "commentary"
        return super().render_responses_harmony_messages(messages, **kwargs)

    def _effort(self, request: ChatCompletionRequest | ResponsesRequest, sent: Any) -> Any:
        """The level of reasoning: the one that was `sent` in its field, or else that among the
        arguments of the chat template, of which the format has no other one."""
        given = request.chat_template_kwargs or {}
        for name, value in given.items():
            if name != _EFFORT or value not in (None, *_EFFORTS):
                raise VLLMValidationError(
                    f"This model reads only '{_EFFORT}' in 'chat_template_kwargs', which is "
                    f"{_LEVELS}.",
                    parameter=f"chat_template_kwargs.{name}",
                )
        if sent is not None:
            return sent
        default = self.default_chat_template_kwargs.get(_EFFORT)
        return given.get(_EFFORT) or (default if default in _EFFORTS else None)


def _warn_of_unread(defaults: Mapping[str, Any]) -> None:
    """Warn of the operator's arguments of the chat template that the Harmony format has not."""
    for name, value in defaults.items():
        if name != _EFFORT or value not in _EFFORTS:
            logger.warning(
                "gpt-oss reads only %s (%s) of --default-chat-template-kwargs: %s has no effect",
                _EFFORT, _LEVELS, json.dumps({name: value}),
            )  # fmt: skip


def _refuse_unheard(request: ResponsesRequest) -> None:
    """Raise VLLMValidationError for what vLLM's Responses of the Harmony format pass over, or
    refuse by a name that nobody sent."""
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
    effort = request.reasoning.effort if request.reasoning else None
    if effort is not None and effort not in _EFFORTS:
        raise VLLMValidationError(
            f"This model's 'reasoning.effort' is {_LEVELS}.", parameter="reasoning.effort"
        )
    for index, tool in enumerate(request.tools if request.tool_choice != "none" else ()):
        if tool.type != "function":
            where = f"tools[{index}].type"
            raise VLLMValidationError(
                f"This model has no tools of type '{tool.type}': '{where}' must be 'function'.",
                parameter=where,
            )


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
