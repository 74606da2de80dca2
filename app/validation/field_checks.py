"""Checks of request fields that vLLM's models let through and OpenAI's API refuses.

vLLM accepts unknown fields, unknown roles, messages without content, and numbers given as
text; each of them hides a client's mistake. The checks here run on the raw JSON before
vLLM's model sees it and raise ApiError naming the field. No vllm import.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from app.errors import ApiError
from app.settings import LimitSettings
from app.validation import fields
from app.validation.fields import Rule
from drafters.vllm.worker_bounds import MAX_SEED

# The kinds of constraint that `structured_outputs` knows; each excludes the others.
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

# Options that stand beside a constraint in `structured_outputs` -> their default. vLLM takes them
# and reads the server's configuration instead (vllm/v1/structured_output/backend_xgrammar.py).
_OPTIONS: dict[str, Any] = {
    "disable_any_whitespace": False,
    "disable_additional_properties": False,
    "whitespace_pattern": None,
}
MAX_BIAS = 100  # OpenAI's bound, above and below 0
# Longest pattern of `repetition_detection`: vLLM's scheduler compares the end of the output with
# each length of pattern, in Python and at each token.
MAX_PATTERN = 256


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


@cache
def _names(model: type[BaseModel]) -> frozenset[str]:
    """Fields of a request model, and their aliases."""
    fields = model.model_fields
    return frozenset(fields) | {field.alias for field in fields.values() if field.alias}


def check_fields(
    payload: dict[str, Any], model: type[BaseModel], rules: Mapping[str, Rule]
) -> None:
    """Refuse unknown fields, and drop the ones that are accepted without effect."""
    fields.check_fields(payload, _names(model), rules)


def check_scalars(payload: Mapping[str, Any], model: type[BaseModel]) -> None:
    """Refuse numbers, texts and booleans of another JSON type: "5", true and 5.5 are no 5."""
    for name, adapter in _scalar_fields(model).items():
        if name not in payload:
            continue
        try:
            adapter.validate_python(payload[name], strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise invalid(name, f"Invalid value for '{name}': {reason}.") from None


@cache
def _scalar_fields(model: type[BaseModel]) -> dict[str, TypeAdapter[Any]]:
    adapters: dict[str, TypeAdapter[Any]] = {}
    for name, field in model.model_fields.items():
        if _is_scalar(field.annotation):
            annotation: Any = field.annotation
            if field.metadata:
                annotation = Annotated[(annotation, *field.metadata)]
            adapters[field.alias or name] = TypeAdapter(annotation)
    return adapters


def check_containers(payload: Mapping[str, Any], model: type[BaseModel]) -> None:
    """Refuse what should be a list or an object and is not: vLLM's models look into some of these
    before they check their type."""
    for name, kind in _container_fields(model).items():
        value = payload.get(name)
        if value is not None and not isinstance(value, kind):
            wanted = "a list" if kind is list else "an object"
            raise invalid(name, f"Invalid type for '{name}': expected {wanted}.")


@cache
def _container_fields(model: type[BaseModel]) -> dict[str, type]:
    """Fields that are always a list, or always an object."""
    found: dict[str, type] = {}
    for name, field in model.model_fields.items():
        annotation = field.annotation
        parts = get_args(annotation) if _is_union(annotation) else (annotation,)
        kinds = {get_origin(part) or part for part in parts} - {type(None)}
        if len(kinds) == 1 and (kind := kinds.pop()) in (list, dict):
            found[field.alias or name] = kind
    return found


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _is_scalar(annotation: Any) -> bool:
    if annotation in (int, float, str, bool, type(None)):
        return True
    origin = get_origin(annotation)
    if origin is Literal:
        return True
    if origin is Annotated:
        inner, *metadata = get_args(annotation)
        # Bounds alone; anything else is vLLM's own validator, which pydantic runs anyway.
        return _is_scalar(inner) and all(isinstance(each, FieldInfo) for each in metadata)
    if _is_union(annotation):
        return all(_is_scalar(part) for part in get_args(annotation))
    return False


def check_generation(
    payload: Mapping[str, Any],
    limits: LimitSettings,
    context: int | None = None,
    *,
    scores_prompts: bool = False,
) -> None:
    """Check bounds that vLLM leaves open to a hostile client, and output limits against `context`.

    vLLM would call an output limit beyond the model's context a prompt that is too long. If the API
    `scores_prompts`, an echo may have no output: the prompt comes back scored.
    """
    least = 0 if scores_prompts and payload.get("echo") is True else 1
    check_n(payload.get("n"), limits)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        value = payload.get(name)
        if isinstance(value, int) and value < least:
            raise invalid(name, f"'{name}' must be at least {least}, got {value}.")
        if isinstance(value, int) and context is not None and value > context:
            raise invalid(
                name,
                f"'{name}' is too large: {value}. The served model's prompt and output together "
                f"have at most {context} tokens.",
                "invalid_value",
            )
    for name in ("logprobs", "top_logprobs"):
        value = payload.get(name)
        if isinstance(value, int) and not 0 <= value <= limits.max_logprobs:
            most = limits.max_logprobs
            raise invalid(name, f"'{name}' must be between 0 and {most}, got {value}.")
    _check_bias(payload.get("logit_bias"))
    _check_seed(payload)
    _check_repetition(payload.get("repetition_detection"))
    _check_stop(payload, limits)
    _check_constraint(payload)


def check_n(n: Any, limits: LimitSettings) -> None:
    """Refuse a number of choices that is out of bounds."""
    if isinstance(n, int) and not 1 <= n <= limits.max_choices:
        raise invalid("n", f"'n' must be between 1 and {limits.max_choices}, got {n}.")


def _check_bias(biases: Any) -> None:
    """Refuse biases beyond OpenAI's bound, to which vLLM would clip them silently."""
    for token, bias in biases.items() if isinstance(biases, dict) else ():
        if isinstance(bias, (int, float)) and not -MAX_BIAS <= bias <= MAX_BIAS:
            raise invalid(
                f"logit_bias.{token}",
                f"'logit_bias.{token}' must be between -{MAX_BIAS} and {MAX_BIAS}, got {bias}.",
            )


def _check_seed(payload: Mapping[str, Any]) -> None:
    """Refuse a seed that leaves the choices after the first one none that fits into 64 bits.

    vLLM counts up from it (vllm/v1/engine/parallel_sampling.py), and its worker, which keeps seeds
    in 64 bits, would end the engine.
    """
    seed, n = payload.get("seed"), payload.get("n")
    if isinstance(seed, int) and isinstance(n, int) and seed + n - 1 > MAX_SEED:
        raise invalid("seed", f"'seed' must be at most {MAX_SEED} less 'n' - 1, got {seed}.")


def _check_repetition(detection: Any) -> None:
    name = "max_pattern_size"
    size = detection.get(name) if isinstance(detection, dict) else None
    if isinstance(size, int) and size > MAX_PATTERN:
        where = f"repetition_detection.{name}"
        raise invalid(where, f"'{where}' must be at most {MAX_PATTERN}, got {size}.")


def _check_stop(payload: Mapping[str, Any], limits: LimitSettings) -> None:
    name = "stop" if "stop" in payload else "stop_sequences"  # Anthropic's
    stop = payload.get(name)
    sequences = [stop] if isinstance(stop, str) else stop
    if sequences is None:
        return
    if not isinstance(sequences, list) or not all(isinstance(s, str) for s in sequences):
        raise invalid(name, f"'{name}' must be a string or a list of strings.")
    if len(sequences) > limits.max_stop_sequences:
        raise invalid(name, f"'{name}' takes at most {limits.max_stop_sequences} sequences.")
    most = limits.max_stop_length
    if any(not 1 <= len(s) <= most for s in sequences):
        raise invalid(name, f"Each stop sequence must have 1 to {most} characters.")


def _check_constraint(payload: Mapping[str, Any]) -> None:
    name = "structured_outputs"
    given = payload.get(name)
    if given is None:
        return
    if not isinstance(given, dict):
        raise invalid(name, f"'{name}' must be an object.")
    if sum(given.get(kind) is not None for kind in CONSTRAINTS) != 1:
        raise invalid(name, f"'{name}' takes exactly one of {', '.join(CONSTRAINTS)}.")
    for option, default in _OPTIONS.items():
        value = given.get(option)
        if value is not None and value is not default:
            where = f"{name}.{option}"
            raise invalid(
                where,
                f"'{where}' is not supported by this server: its operator configures the grammar.",
                "unsupported_parameter",
            )


def check_token_count(ids: Any, name: str, most: int) -> None:
    """Refuse a list of token ids that is longer than `most`, the context."""
    if isinstance(ids, list) and len(ids) > most:
        message = (
            f"This model's maximum context length is {most} tokens. However, '{name}' holds "
            f"{len(ids)} of them."
        )
        raise invalid(name, message, "context_length_exceeded")


def check_token_ids(payload: Mapping[str, Any], name: str, vocabulary: int) -> None:
    """Refuse token ids, alone or in batches, that the model's vocabulary does not have.

    Whether they are integers is left to vLLM's request models.
    """
    value = payload.get(name)
    if not isinstance(value, list):
        return
    for index, item in enumerate(value):
        ids = item if isinstance(item, list) else [item]
        if any(isinstance(token, int) and not 0 <= token < vocabulary for token in ids):
            where = f"{name}[{index}]"
            raise invalid(name, f"'{where}' is outside of the vocabulary of {vocabulary} tokens.")
