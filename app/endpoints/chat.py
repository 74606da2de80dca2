"""POST /v1/chat/completions: chat completions as in OpenAI's API."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from app.declaration.answers import AnswerFormat
from app.declaration.endpoint import Endpoint, Payload, ServingParts
from app.declaration.model_facts import ModelFacts
from app.declaration.null_fields import with_required_nulls
from app.validation import message_checks, replay
from app.validation.fields import (
    MODERATION,
    NAMES_IN_ERRORS,
    NOT_KEPT,
    OPENAI,
    RENDERING,
    SOME_LOGPROBS,
    TEMPLATE,
    OnlyAt,
    WithoutEffect,
)
from app.validation.nested import CHAT_MEMBERS
from app.validation.tools import ToolRules


class ChatFormat(AnswerFormat):
    """OpenAI's form, with the nulls that the schema of a chat requires."""

    def body(self, answer: BaseModel) -> dict[str, Any]:
        """The JSON of a whole answer."""
        return with_required_nulls(super().body(answer))


def _models() -> tuple[type[BaseModel], ...]:
    from app.serving.request_models import ChatRequest

    return (ChatRequest,)


def _serving(parts: ServingParts) -> Any:
    from app.serving.classes.chat import ChatServing

    return parts.chat(ChatServing)


def _check(payload: Payload, facts: ModelFacts) -> None:
    message_checks.check_messages(payload.get("messages"))


def _rewrite(payload: Payload, facts: ModelFacts) -> None:
    payload["messages"] = replay.chat_messages(
        payload["messages"], any_arguments=facts.any_arguments
    )


ENDPOINTS = (
    Endpoint(
        name="chat",
        path="/v1/chat/completions",
        prompt="messages",
        models=_models,
        serving=_serving,
        call=lambda serving: serving.create_chat_completion,
        items="messages",
        fields={
            **OPENAI,
            "audio": OnlyAt((), "answers are text"),
            "best_of": OnlyAt((1,), "ask for 'n' choices and choose among them"),
            "chat_template": TEMPLATE,
            "function_call": OnlyAt(("none", "auto"), "use 'tool_choice'"),
            "functions": OnlyAt(([],), "use 'tools'"),
            "logprob_token_ids": SOME_LOGPROBS,
            "modalities": OnlyAt((["text"],), "answers are text"),
            "moderation": MODERATION,
            "prediction": WithoutEffect(dict, "drafts are made without it"),
            "return_token_offsets": WithoutEffect(bool, RENDERING),
            "store": WithoutEffect(bool, NOT_KEPT),
            "verbosity": WithoutEffect(str, "the served models know no levels of it"),
            "web_search_options": OnlyAt((), "this server does not search the web"),
        },
        ignored_members=CHAT_MEMBERS,
        names_in_errors=NAMES_IN_ERRORS,
        tools=ToolRules(
            ("function",), check=message_checks.check_tools, allowed_in="allowed_tools"
        ),
        check=_check,
        rewrite=_rewrite,
        generates=True,
        output_limit=("max_completion_tokens", "max_tokens"),
        sequence_fields=("n",),
        reports_token_origins=True,
        answers=ChatFormat(),
        invocation_field="messages",
        trace_operation="chat",
    ),
)
