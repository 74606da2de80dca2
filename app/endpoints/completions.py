"""POST /v1/completions: text completions as in OpenAI's API."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from app.declaration.endpoint import Endpoint, Payload, ServingParts
from app.declaration.model_facts import ModelFacts
from app.validation.field_checks import check_token_ids
from app.validation.fields import (
    NAMES_IN_ERRORS,
    NOT_KEPT,
    OPENAI,
    RENDERING,
    SOME_LOGPROBS,
    OnlyAt,
    SameAs,
    WithoutEffect,
)


def _models() -> tuple[type[BaseModel], ...]:
    from app.serving.request_models import TextRequest

    return (TextRequest,)


def _serving(parts: ServingParts) -> Any:
    from app.serving.classes.completions import TextServing

    return TextServing(parts.engine, parts.models, **parts.generating)


def _check(payload: Payload, facts: ModelFacts) -> None:
    check_token_ids(payload, "prompt", facts.vocabulary)


ENDPOINTS = (
    Endpoint(
        name="completions",
        path="/v1/completions",
        prompt="prompt",
        models=_models,
        serving=_serving,
        call=lambda serving: serving.create_completion,
        fields={
            **OPENAI,
            "best_of": OnlyAt((1,), "ask for 'n' choices and choose among them"),
            "logprob_token_ids": SOME_LOGPROBS,
            "max_completion_tokens": SameAs("max_tokens", int, "chat's name for the same limit"),
            "prompt_embeds": OnlyAt((), "prompts are text or token ids"),
            "return_token_offsets": WithoutEffect(bool, RENDERING),
            "store": WithoutEffect(bool, NOT_KEPT),
            "suffix": OnlyAt(("",), "the served models only continue a text"),
        },
        ignored_members=frozenset({"include_obfuscation"}),
        names_in_errors=NAMES_IN_ERRORS,
        check=_check,
        generates=True,
        output_limit=("max_completion_tokens", "max_tokens"),
        sequence_fields=("n", "prompt"),
        scores_prompts=True,
        reports_token_origins=True,
        invocation_field="prompt",
        trace_operation="text_completion",
    ),
)
