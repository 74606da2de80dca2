"""Validation of a request body by its endpoint's declaration, before its request model sees it."""

from __future__ import annotations

from pydantic import BaseModel

from app.declaration.endpoint import Endpoint, Payload
from app.declaration.model_facts import ModelFacts
from app.validation import (
    constraints,
    field_checks,
    fields,
    message_checks,
    nested,
    size_limits,
    tools,
)
from app.validation.speculation_field import take_options


def check_request(
    payload: Payload, endpoint: Endpoint, model: type[BaseModel], facts: ModelFacts
) -> None:
    """Check a body and bring it, in place, into the form that the request `model` takes.

    Fields that are accepted without effect are dropped. Raises ApiError naming the field.
    """
    endpoint.check(payload, facts)
    if endpoint.tools is not None:
        _check_tools(payload, endpoint.tools, facts, is_response=endpoint.items == "input")
    _check_limits(payload, endpoint, facts)
    if endpoint.generates:
        take_options(
            payload,
            reports_token_origins=endpoint.reports_token_origins,
            server_reports=facts.reports_token_origins,
        )
    field_checks.check_fields(payload, model, endpoint.fields)
    field_checks.check_scalars(payload, model)
    field_checks.check_containers(payload, model)
    fields.check_beam_search(payload)
    nested.check_nested(payload, model, endpoint.ignored_members)
    constraints.check_formats(payload)
    constraints.check_schemas(payload, facts.limits)
    field_checks.check_generation(
        payload, facts.limits, facts.context, scores_prompts=endpoint.scores_prompts
    )
    if not facts.bounds_reasoning:
        _refuse_thinking_budget(payload)
    fields.rename(payload, endpoint.fields)
    fields.replace_zero_top_p(payload)
    endpoint.rewrite(payload, facts)


def _check_limits(payload: Payload, endpoint: Endpoint, facts: ModelFacts) -> None:
    size_limits.check_template(payload)
    size_limits.check_counts(payload, facts.limits)
    size_limits.check_constraints(payload, facts.limits)
    items = payload.get(endpoint.items)
    if facts.text_only:
        message_checks.check_media(items, endpoint.items)
    else:
        size_limits.check_urls(items, endpoint.items, facts.limits.media_hosts)


def _check_tools(
    payload: Payload, rules: tools.ToolRules, facts: ModelFacts, *, is_response: bool
) -> None:
    tools.take_unknown_tools(payload, rules, facts.unknown_tools)
    rules.check(payload)
    tools.take_allowed_tools(payload, rules, facts.unknown_tools)
    constraints.name_parameters(payload)
    if not facts.reads_calls:
        tools.check_unread_calls(payload, rules)
    if rules.needs_parser:
        facts.call_grammar.check(payload, is_response=is_response)


def _refuse_thinking_budget(payload: Payload) -> None:
    """Raise ApiError for vLLM's reasoning budget, where nobody sees where reasoning ends. That of
    Anthropic's `thinking` is a bound which the model may stay below: it is dropped
    (app/serving/classes/messages.py)."""
    name = "thinking_token_budget"
    if payload.get(name) is None:
        return
    raise field_checks.invalid(
        name,
        f"'{name}' is not supported: this server does not see where the model's reasoning ends, "
        "since it has no --reasoning-parser, or one without marks of the beginning and the end.",
        "unsupported_parameter",
    )
