"""How each dialect's request fields are treated where vLLM's request model does not settle it.

One table: the checks of a body, the OpenAPI document (app/serving/schemas.py) and docs/fields.md
are made from it. A field that is in vLLM's model and not in the table is honoured; a field in
neither is refused as unknown. No vllm import.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from app.errors import ApiError

_JSON_TYPES = {bool: "boolean", int: "integer", str: "string", dict: "object", list: "array"}


@dataclass(frozen=True)
class WithoutEffect:
    """Accepted, because every answer already keeps what it asks for, or it asks for nothing that
    could change one."""

    kind: type
    why: str


@dataclass(frozen=True)
class OnlyAt:
    """Accepted at the values that change nothing, and refused at any other with the reason."""

    values: tuple[Any, ...]
    why: str


@dataclass(frozen=True)
class SameAs:
    """Another name of a field that vLLM's request model has; this one counts if both are given."""

    name: str
    kind: type
    why: str


Rule = WithoutEffect | OnlyAt | SameAs

_LABEL = "a label for the client's own records"
_CACHE = "prefixes are cached anyway, for as long as there is room"
_TIER = "there is one tier of service"
_STEERS = "the gateway sets it"
_NOT_KEPT = "answers of this API are not kept, whatever it says"
_RENDERING = "vLLM's servers of rendered prompts read it, and this is none"
_TEMPLATE = OnlyAt((), "the served model's own template is the only one that runs")
_MEDIA = "how media are loaded is the operator's choice"

_EVERYWHERE: dict[str, Rule] = {
    "request_id": OnlyAt(("",), _STEERS),
    "priority": OnlyAt((0,), _STEERS),
    "kv_transfer_params": OnlyAt(({},), _STEERS),
    "ec_transfer_params": OnlyAt(({},), _STEERS),
    "mm_processor_kwargs": OnlyAt(({},), _MEDIA),
    "media_io_kwargs": OnlyAt(({},), _MEDIA),
}
_VLLM: dict[str, Rule] = {
    "mm_payload": WithoutEffect(str, _RENDERING),
    "return_mm_kwargs": WithoutEffect(bool, _RENDERING),
}
_OPENAI: dict[str, Rule] = {
    **_EVERYWHERE,
    **_VLLM,
    "metadata": WithoutEffect(dict, _LABEL),
    "prompt_cache_key": WithoutEffect(str, _CACHE),
    "prompt_cache_retention": WithoutEffect(str, _CACHE),
    "safety_identifier": WithoutEffect(str, _LABEL),
    "service_tier": WithoutEffect(str, _TIER),
    "user": WithoutEffect(str, _LABEL),
}
_ANTHROPIC: dict[str, Rule] = {
    **_EVERYWHERE,
    "cache_control": WithoutEffect(dict, _CACHE),
    "context_management": WithoutEffect(dict, "the conversation is taken as it is sent"),
    "mcp_servers": OnlyAt(([],), "this server calls no tools itself"),
}

FIELDS: dict[str, dict[str, Rule]] = {
    "chat": {
        **_OPENAI,
        "audio": OnlyAt((), "answers are text"),
        "best_of": OnlyAt((1,), "ask for 'n' choices and choose among them"),
        "chat_template": _TEMPLATE,
        "function_call": OnlyAt(("none", "auto"), "use 'tool_choice'"),
        "functions": OnlyAt(([],), "use 'tools'"),
        "modalities": OnlyAt((["text"],), "answers are text"),
        "prediction": WithoutEffect(dict, "drafts are made without it"),
        "return_token_offsets": WithoutEffect(bool, _RENDERING),
        "store": WithoutEffect(bool, _NOT_KEPT),
        "verbosity": WithoutEffect(str, "the served models know no levels of it"),
        "web_search_options": OnlyAt((), "this server does not search the web"),
    },
    "completions": {
        **_OPENAI,
        "best_of": OnlyAt((1,), "ask for 'n' choices and choose among them"),
        "max_completion_tokens": SameAs("max_tokens", int, "chat's name for the same limit"),
        "prompt_embeds": OnlyAt((), "prompts are text or token ids"),
        "return_token_offsets": WithoutEffect(bool, _RENDERING),
        "store": WithoutEffect(bool, _NOT_KEPT),
        "suffix": OnlyAt(("",), "the served models only continue a text"),
    },
    "responses": {
        **_OPENAI,
        "background": OnlyAt((False,), "an answer is made while its request waits for it"),
        "client_metadata": WithoutEffect(dict, _LABEL),
        "conversation": OnlyAt((), "name the turn before in 'previous_response_id'"),
        "max_tool_calls": WithoutEffect(int, "it bounds tools that this server does not have"),
        "prompt": OnlyAt((), "this server stores no prompts"),
        "stream_options": WithoutEffect(dict, "events are not padded"),
    },
    "messages": {
        **_ANTHROPIC,
        **_VLLM,
        "container": OnlyAt((), "this server runs no code"),
        "inference_geo": WithoutEffect(str, "the model runs where this server is"),
        "metadata": WithoutEffect(dict, _LABEL),
        "service_tier": WithoutEffect(str, _TIER),
    },
    "count_tokens": _ANTHROPIC,
    "tokenize": {**_EVERYWHERE, "chat_template": _TEMPLATE},
    "detokenize": _EVERYWHERE,
}


def check_fields(payload: dict[str, Any], known: Collection[str], dialect: str) -> None:
    """Refuse unknown fields and what cannot be honoured. Drop what has no effect, unless vLLM's
    model knows it (`known`): then its answer may repeat it."""
    rules = FIELDS.get(dialect, {})
    for name in list(payload):
        rule, value = rules.get(name), payload[name]
        if rule is None:
            if name not in known:
                raise ApiError(
                    400,
                    f"Unrecognized request argument supplied: {name}",
                    param=name,
                    code="unknown_parameter",
                )
            continue
        if isinstance(rule, OnlyAt):
            if not any(_equal(value, harmless) for harmless in rule.values):
                message = f"'{name}' is not supported by this server: {rule.why}."
                raise ApiError(400, message, param=name, code="unsupported_parameter")
        elif not _is(value, rule.kind):
            wanted = _JSON_TYPES[rule.kind]
            message = f"Invalid type for '{name}': expected {wanted}."
            raise ApiError(400, message, param=name)
        elif isinstance(rule, SameAs):
            continue  # `rename` comes when all is checked
        elif name in known:
            continue
        del payload[name]


def rename(payload: dict[str, Any], dialect: str) -> None:
    """Give fields with a second name the name that vLLM's model knows."""
    for name, rule in FIELDS.get(dialect, {}).items():
        if isinstance(rule, SameAs) and name in payload:
            payload[rule.name] = payload.pop(name)


def names_of(field: str, dialect: str) -> tuple[str, ...]:
    """Every name of a field of vLLM's model, in the order in which they count."""
    rules = FIELDS.get(dialect, {}).items()
    others = (name for name, rule in rules if isinstance(rule, SameAs) and rule.name == field)
    return (*others, field)


def json_type(kind: type) -> str:
    """JSON schema's name for a Python type."""
    return _JSON_TYPES[kind]


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _equal(value: Any, harmless: Any) -> bool:
    """Equality in JSON, where false is no 0 and 1.0 is 1."""
    return isinstance(value, bool) == isinstance(harmless, bool) and bool(value == harmless)
