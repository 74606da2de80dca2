"""How request fields are treated where vLLM's request model does not settle it.

Each API has a table of rules (app/endpoints); the checks of a body, the OpenAPI document
(app/serving/schemas.py) and docs/fields.md are made from it. A field that is in vLLM's model and
not in the table is honoured; a field in neither is refused as unknown. No vllm import.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from app.errors import ApiError
from drafters.config import MAX_K

_JSON_TYPES = {bool: "boolean", int: "integer", str: "string", dict: "object", list: "array"}


@dataclass(frozen=True)
class WithoutEffect:
    """Accepted without effect: every answer is already as the field asks, or no answer depends on
    it."""

    kind: type
    why: str


@dataclass(frozen=True)
class OnlyAt:
    """Accepted at the values that change nothing, and refused at any other with the reason."""

    values: tuple[Any, ...]
    why: str


@dataclass(frozen=True)
class NotAt:
    """Honoured, except at values that would be ignored: these are refused with the reason."""

    values: tuple[Any, ...]
    why: str


@dataclass(frozen=True)
class SameAs:
    """Another name of a field that vLLM's request model has; this one counts if both are given."""

    name: str
    kind: type
    why: str


Rule = WithoutEffect | OnlyAt | NotAt | SameAs

# Reasons that several APIs give.
LABEL = "a label for the client's own records"
CACHE = "prefixes are cached anyway, for as long as there is room"
TIER = "there is one tier of service"
AS_SENT = "the conversation is taken as it is sent"
NOT_KEPT = "answers of this API are not kept, whatever it says"
RENDERING = "only vLLM's servers of rendered prompts read it"
TEMPLATE = OnlyAt((), "the served model's own template is the only one that runs")
# On the V1 model runner a batch that holds such a request gives all of its requests the log
# probabilities in its form, and one with drafts fails (vllm/v1/sample/sampler.py, forward).
SOME_LOGPROBS = OnlyAt(([],), "ask for the most likely tokens of each position in 'logprobs'")
MODERATION = OnlyAt((), "this server moderates neither prompts nor answers")
_STEERS = "the gateway sets it"
# What vLLM's engine reads of `vllm_xargs` for itself (vllm/v1/request.py).
_ENGINE_ONLY = ("kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode")
# Only events of the KV cache hold it (vllm/v1/core/block_pool.py).
_SESSION = "no answer depends on it"
_MEDIA = "how media are loaded is the operator's choice"

# Fields that vLLM's request models have in every API.
EVERYWHERE: dict[str, Rule] = {
    "request_id": OnlyAt(("",), _STEERS),
    "priority": OnlyAt((0,), _STEERS),
    "kv_transfer_params": OnlyAt(({},), _STEERS),
    "ec_transfer_params": OnlyAt(({},), _STEERS),
    "mm_processor_kwargs": OnlyAt(({},), _MEDIA),
    "media_io_kwargs": OnlyAt(({},), _MEDIA),
}
# Fields of vLLM's own, in the APIs that generate.
GENERATING: dict[str, Rule] = {
    "mm_payload": WithoutEffect(str, RENDERING),
    "return_mm_kwargs": WithoutEffect(bool, RENDERING),
    "watermarking": NotAt(
        (True,), "a server that marks its texts does so wherever it is not false"
    ),
}
# Fields of OpenAI's APIs.
OPENAI: dict[str, Rule] = {
    **EVERYWHERE,
    **GENERATING,
    "metadata": WithoutEffect(dict, LABEL),
    "prompt_cache_key": WithoutEffect(str, CACHE),
    "prompt_cache_options": WithoutEffect(dict, CACHE),
    "prompt_cache_retention": WithoutEffect(str, CACHE),
    "safety_identifier": WithoutEffect(str, LABEL),
    "seed": NotAt((-1,), "vLLM takes it for no seed: send none, or another one"),
    "service_tier": WithoutEffect(str, TIER),
    "session_id": WithoutEffect(str, _SESSION),
    "user": WithoutEffect(str, LABEL),
}
# What vLLM's errors call fields of OpenAI's APIs -> the names with which they were sent. A chat
# template is never sent: where vLLM names one, it is about the template's arguments.
NAMES_IN_ERRORS = {"max_tokens": "max_completion_tokens", "chat_template": "chat_template_kwargs"}
# Fields that vLLM's beam search ignores -> the values at which they change nothing.
NOT_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "routed_experts_prompt_start": (0,),
    "seed": (),
    "spaces_between_special_tokens": (True,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "thinking_token_budget": (-1,),
    "tool_choice": ("auto", "none"),
    "top_k": (0, -1),
    "top_p": (1,),
}
# Fields of a beam search alone -> the values at which they change nothing.
ONLY_WITH_BEAMS: dict[str, tuple[Any, ...]] = {"length_penalty": (1,)}
# The `top_p` that stands for 0, which vLLM refuses.
LEAST_TOP_P = 1e-6
# Largest `length_penalty`, above and below 0. vLLM divides by the length to this power, which is
# too large or too small for a float soon after (vllm/entrypoints/generate/beam_search/utils.py).
MAX_LENGTH_PENALTY = 10
# Most tokens of a beam search: beams x the limit of the output. Each beam may end at each step, and
# vLLM keeps each text that has ended, as lists of all of its tokens and log probabilities
# (vllm/entrypoints/generate/beam_search/online.py): 16 bytes a token, 130 MB at this bound.
MAX_BEAM_TOKENS = 4096


def check_fields(
    payload: dict[str, Any], known: Collection[str], rules: Mapping[str, Rule]
) -> None:
    """Refuse unknown fields and what cannot be honoured, and drop fields without effect.

    A field that vLLM's model has (`known`) stays, since vLLM's answer may repeat it.
    """
    for name in list(payload):
        rule, value = rules.get(name), payload[name]
        if rule is None or (isinstance(rule, NotAt) and name not in known):
            if name not in known:
                raise ApiError(
                    400,
                    f"Unrecognized request argument supplied: {name}",
                    param=name,
                    code="unknown_parameter",
                )
            continue
        if isinstance(rule, NotAt):
            if any(_equal(value, ignored) for ignored in rule.values):
                raise _unsupported(name, rule.why, f" at {json.dumps(value)}")
            continue
        if isinstance(rule, OnlyAt):
            if not any(_equal(value, harmless) for harmless in rule.values):
                raise _unsupported(name, rule.why)
        elif not _is(value, rule.kind):
            wanted = _JSON_TYPES[rule.kind]
            message = f"Invalid type for '{name}': expected {wanted}."
            raise ApiError(400, message, param=name)
        elif isinstance(rule, SameAs):
            continue  # left to `rename`, once all fields are checked
        elif name in known:
            continue
        del payload[name]
    extra = payload.get("vllm_xargs")
    for name in extra if isinstance(extra, dict) else ():
        if name in _ENGINE_ONLY:
            raise _unsupported(f"vllm_xargs.{name}", _STEERS)


def check_beam_search(payload: Mapping[str, Any]) -> None:
    """Refuse fields that a beam search would ignore, values that it cannot take, and what only a
    beam search has beside another request.

    Tools are rendered, and calls are read out of a beam's text, but nothing forces a call or holds
    it to a schema.

    Raises ApiError, which names all of the fields.
    """
    if payload.get("use_beam_search") is not True:
        for name, values in ONLY_WITH_BEAMS.items():
            if _has_effect(payload, name, values):
                raise _unsupported(name, "only a beam search ('use_beam_search') applies it")
        return
    extra = payload.get("vllm_xargs")
    extra = extra if isinstance(extra, dict) else {}
    ignored = [
        *(name for name, values in NOT_WITH_BEAMS.items() if _has_effect(payload, name, values)),
        *_strict_tools(payload.get("tools")),
        *(f"vllm_xargs.{name}" for name in extra if name != MAX_K),
    ]
    if ignored:
        names = ", ".join(f"'{name}'" for name in ignored)
        message = f"'use_beam_search' excludes {names}: a beam search does not apply them."
        raise ApiError(400, message, param="use_beam_search", code="unsupported_parameter")
    penalty = payload.get("length_penalty")
    if penalty is not None and not abs(penalty) <= MAX_LENGTH_PENALTY:  # nor a NaN
        most = MAX_LENGTH_PENALTY
        message = f"'length_penalty' must be between -{most} and {most}, got {penalty}."
        raise ApiError(400, message, param="length_penalty")
    n = payload.get("n", 1)
    for name in ("logprobs", "top_logprobs"):
        count = payload.get(name)
        if isinstance(count, int) and isinstance(n, int) and count > 2 * n:
            message = f"'{name}' must be at most twice 'n' ({2 * n}) with 'use_beam_search'."
            raise ApiError(400, message, param=name)


def _strict_tools(tools: Any) -> Iterator[str]:
    """Places where a tool wants its calls held to its schema."""
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and function.get("strict") is True:
            yield f"tools[{index}].function.strict"


def _has_effect(payload: Mapping[str, Any], name: str, without: tuple[Any, ...]) -> bool:
    value = payload.get(name)
    return value is not None and not any(_equal(value, harmless) for harmless in without)


def _unsupported(param: str, why: str, at: str = "") -> ApiError:
    message = f"'{param}'{at} is not supported by this server: {why}."
    return ApiError(400, message, param=param, code="unsupported_parameter")


def rename(payload: dict[str, Any], rules: Mapping[str, Rule]) -> None:
    """Give fields with a second name the name that vLLM's model knows."""
    for name, rule in rules.items():
        if isinstance(rule, SameAs) and name in payload:
            payload[rule.name] = payload.pop(name)


def replace_zero_top_p(payload: dict[str, Any]) -> None:
    """Have a `top_p` of 0, which OpenAI takes, leave the most probable token alone.

    vLLM refuses 0. A tiny value takes its place, in answers too that repeat their request. `top_k`
    makes it exact: vLLM adds probabilities in float32, so that of many unlikely tokens a tiny
    `top_p` would leave several.
    """
    if _equal(payload.get("top_p"), 0):
        payload["top_p"], payload["top_k"] = LEAST_TOP_P, 1


def json_type(kind: type) -> str:
    """JSON schema's name for a Python type."""
    return _JSON_TYPES[kind]


def _is(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _equal(value: Any, harmless: Any) -> bool:
    """Equality in JSON, where false is no 0 and 1.0 is 1."""
    return isinstance(value, bool) == isinstance(harmless, bool) and bool(value == harmless)
