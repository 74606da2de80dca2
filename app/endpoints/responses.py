"""POST /v1/responses and /v1/responses/input_tokens: OpenAI's Responses API."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from pydantic import BaseModel

from app.declaration.answers import AnswerFormat
from app.declaration.endpoint import Endpoint, Payload, ServingParts
from app.declaration.model_facts import ModelFacts
from app.errors import ApiError
from app.request_usage import count_tokenized
from app.serving.response_fields import published, published_event
from app.validation import message_checks, replay
from app.validation.field_checks import invalid
from app.validation.fields import AS_SENT, LABEL, MODERATION, OPENAI, OnlyAt, Rule, WithoutEffect
from app.validation.nested import CHAT_MEMBERS
from app.validation.speculation_field import FIELD
from app.validation.tools import ToolRules

PATH = "/v1/responses"
# The tiers that vLLM's request model knows; any other one is served as `auto`.
_KNOWN_TIERS = ("auto", "default", "flex", "scale", "priority")
# Entries of `include` that vLLM's request model does not know: they are of absent tools.
_OF_ABSENT_TOOLS = ("web_search_call.action.sources", "web_search_call.results")
_FIELDS: dict[str, Rule] = {
    **OPENAI,
    "access_programs": OnlyAt(({"cyber": "standard"},), "this server has no access programs"),
    "background": OnlyAt((False,), "an answer is made while its request waits for it"),
    "client_metadata": WithoutEffect(dict, LABEL),
    "context_management": WithoutEffect(list, AS_SENT),
    "conversation": OnlyAt((), "name the turn before in 'previous_response_id'"),
    "image": OnlyAt(
        ({"context_compression": "auto"}, {"context_compression": "disabled"}),
        "images are taken as they are sent",
    ),
    "max_tool_calls": WithoutEffect(int, "it bounds tools that this server does not have"),
    "moderation": MODERATION,
    "personality": OnlyAt((), "say in 'instructions' how to answer"),
    "previous_input_messages": OnlyAt(([],), "send earlier turns in 'input'"),
    "prompt": OnlyAt((), "this server stores no prompts"),
    "stream_options": WithoutEffect(dict, "events are not padded"),
}
_IGNORED_MEMBERS = CHAT_MEMBERS | {
    *("caller", "created_by", "encrypted_content", "id", "logprobs", "status"),
}
# What the prompt does not depend on, of the fields that a response honours.
_NOT_COUNTED = frozenset({
    "cache_salt", "enable_response_messages", "frequency_penalty", "ignore_eos", "include",
    "include_reasoning", "include_stop_str_in_output", "logit_bias", "min_p",
    "parallel_tool_calls", "presence_penalty", "repetition_penalty", "seed",
    "skip_special_tokens", "stop", "stop_token_ids", "structured_outputs", "temperature", "text",
    "top_k", "top_logprobs", "top_p", "vllm_xargs", "watermarking",
})  # fmt: skip
_NAMES_IN_ERRORS = {"max_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort"}
_TOOLS = ToolRules(("function", "custom", "namespace"), any_choice=True, allowed_in="")


class ResponsesFormat(AnswerFormat):
    """Objects with the fields of OpenAI's published schema, nulls among them; named events."""

    def body(self, answer: BaseModel) -> dict[str, Any]:
        """The JSON of a whole response."""
        _mark_cut(answer.status, answer.output)  # type: ignore[attr-defined]
        return published(answer.model_dump(mode="json", by_alias=True))

    async def corrected(self, stream: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """The events, with an item that was cut marked as `incomplete`.

        vLLM marks every item as completed. The end of an item waits for the next event, which comes
        at once and says whether the item was cut: the end of the response.
        """
        done = None
        try:
            async for item in stream:
                if done is not None:
                    if item.type == "response.completed":
                        output = item.response.output
                        _mark_cut(item.response.status, output)
                        if output and getattr(output[-1], "status", None) == "incomplete":
                            _mark_cut("incomplete", [done.item])
                    yield done
                    done = None
                if item.type == "response.output_item.done":
                    done = item
                else:
                    yield item
        except Exception:
            if done is not None:
                yield done
            raise
        finally:
            await stream.aclose()

    def repeats_answer(self, item: Any) -> bool:
        """Whether an event object holds a response, or a whole part of one."""
        return any(hasattr(item, field) for field in ("response", "item", "part"))

    def event(self, item: Any, *, null_usage: bool = False) -> str:
        """The text of an event object; `response.incomplete` where vLLM completes a cut answer."""
        kind, data = item.type, item.model_dump_json(by_alias=True)
        if kind == "response.completed" and item.response.status == "incomplete":
            kind = "response.incomplete"
        if self.repeats_answer(item):
            data = json.dumps({**published_event(json.loads(data)), "type": kind})
        return f"event: {kind}\ndata: {data}\n\n"

    def error_event(self, error: ApiError, sequence_number: int = 0) -> str:
        """An error as a numbered event, with the members of OpenAI's schema.

        OpenAI's clients raise an event that has `error`, and read any other one as a part of the
        answer.
        """
        body: dict[str, Any] = {"type": "error", "code": error.code or error.type}
        body |= {"message": error.message, "param": error.param, **error.envelope()}
        body |= {"sequence_number": sequence_number}
        return f"event: error\ndata: {json.dumps(body)}\n\n"


def _mark_cut(status: str, output: Sequence[Any]) -> None:
    """Mark the last item of a response that was cut as incomplete."""
    if status == "incomplete" and output:
        output[-1].status = "incomplete"


def _models() -> tuple[type[BaseModel], ...]:
    from app.serving.request_models import ItemsRequest

    return (ItemsRequest,)


def _serving(parts: ServingParts) -> Any:
    from app.serving.classes.responses import ResponsesServing

    return ResponsesServing(
        parts.engine,
        parts.models,
        parts.renderer,
        request_logger=None,
        **parts.rendering,
        **parts.parsing,
    )


def _check(payload: Payload, facts: ModelFacts) -> None:
    if payload.get("input") == []:
        raise invalid("input", "'input' must hold at least one item.")
    message_checks.check_items(payload.get("input"))
    tier = payload.get("service_tier")
    if isinstance(tier, str) and tier not in _KNOWN_TIERS:  # the checks of fields know vLLM's alone
        payload["service_tier"] = "auto"


def _rewrite(payload: Payload, facts: ModelFacts) -> None:
    if isinstance(include := payload.get("include"), list):
        payload["include"] = [entry for entry in include if entry not in _OF_ABSENT_TOOLS]
    if payload.get("top_logprobs"):  # vLLM returns them only if `include` asks for them, too
        payload["include"] = [*payload.get("include", []), "message.output_text.logprobs"]
    if isinstance(payload.get("input"), list):
        payload["input"] = replay.response_items(
            payload["input"], any_arguments=facts.any_arguments
        )


def _count(serving: Any) -> Callable[[Any], Awaitable[Any]]:
    return count_tokenized(
        serving.count_input_tokens, lambda _, answer: getattr(answer, "input_tokens", None)
    )


ENDPOINTS = (
    Endpoint(
        name="responses",
        path=PATH,
        prompt="input",
        models=_models,
        serving=_serving,
        call=lambda serving: serving.create_responses,
        items="input",
        fields=_FIELDS,
        ignored_members=_IGNORED_MEMBERS,
        names_in_errors=_NAMES_IN_ERRORS,
        tools=_TOOLS,
        check=_check,
        rewrite=_rewrite,
        generates=True,
        echoes_tools=True,
        output_limit=("max_output_tokens",),
        continues_responses=True,
        keeps_responses=True,
        answers=ResponsesFormat(),
        invocation_field="input",
        trace_operation="chat",
    ),
    # It takes the body of a response and checks it in the same way, so that the count is the one
    # which that response would report.
    Endpoint(
        name="input_tokens",
        path=f"{PATH}/input_tokens",
        prompt="input",
        models=_models,
        serving=_serving,
        call=_count,
        items="input",
        fields={
            **_FIELDS,
            FIELD: WithoutEffect(dict, "nothing is drafted"),
            "store": WithoutEffect(bool, "a count is not kept"),
            "stream": WithoutEffect(bool, "a count is one answer"),
        },
        unused=_NOT_COUNTED,
        ignored_members=_IGNORED_MEMBERS,
        names_in_errors=_NAMES_IN_ERRORS,
        tools=_TOOLS,
        check=_check,
        rewrite=_rewrite,
        continues_responses=True,
    ),
)
