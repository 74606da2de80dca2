"""What vLLM's request models let through and OpenAI's API refuses.

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

from app.errors import ApiError

MAX_STOP_SEQUENCES = 16
MAX_STOP_LENGTH = 1024
MAX_CHOICES = 128

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

# Accepted because every answer already honours them: bookkeeping, hints that cannot
# change the text, and deprecated names whose only harmless value is their default.
_NO_EFFECT: dict[str, dict[str, type]] = {
    "chat": {
        "metadata": dict,
        "prediction": dict,
        "prompt_cache_key": str,
        "prompt_cache_retention": str,
        "safety_identifier": str,
        "service_tier": str,
        "store": bool,
        "user": str,
    },
    "completions": {"user": str},
}
# Known to OpenAI's API and not to ours: fine at these values, refused at any other.
_ONLY_AT: dict[str, dict[str, tuple[Any, ...]]] = {
    "chat": {"modalities": (["text"],), "best_of": (1,)},
    "completions": {"best_of": (1,), "suffix": ("",)},
}
# Would let a client steer the engine past the gateway.
_REFUSED = ("request_id", "priority", "kv_transfer_params", "ec_transfer_params")


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def check_fields(payload: dict[str, Any], model: type[BaseModel], operation: str) -> None:
    """Refuse unknown fields, and drop the ones that are accepted without effect."""
    known = set(model.model_fields) | {
        field.alias for field in model.model_fields.values() if field.alias
    }
    for name in list(payload):
        value = payload[name]
        if name in _REFUSED:
            if value:
                raise invalid(name, f"'{name}' is not supported by this server.")
        elif name in _ONLY_AT.get(operation, {}):
            if value is not None and value not in _ONLY_AT[operation][name]:
                raise invalid(name, f"'{name}' is not supported by this server.")
        elif name in _NO_EFFECT.get(operation, {}):
            wanted = _NO_EFFECT[operation][name]
            if value is not None and not isinstance(value, wanted):
                raise invalid(name, f"Invalid type for '{name}': expected {wanted.__name__}.")
            if name in known:
                continue
        elif name in known:
            continue
        else:
            raise invalid(
                name, f"Unrecognized request argument supplied: {name}", "unknown_parameter"
            )
        del payload[name]


def check_scalars(payload: Mapping[str, Any], model: type[BaseModel]) -> None:
    """Numbers, texts and booleans must have their own JSON type: "5", true and 5.5 are no 5."""
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


def _is_scalar(annotation: Any) -> bool:
    if annotation in (int, float, str, bool, type(None)):
        return True
    origin = get_origin(annotation)
    if origin is Literal:
        return True
    if origin is Annotated:
        return False  # carries vLLM's own validator, which pydantic runs anyway
    if origin in (Union, types.UnionType):
        return all(_is_scalar(part) for part in get_args(annotation))
    return False


def check_generation(payload: Mapping[str, Any]) -> None:
    """Bounds that stock leaves open and a hostile client would use."""
    n = payload.get("n")
    if isinstance(n, int) and not 1 <= n <= MAX_CHOICES:
        raise invalid("n", f"'n' must be between 1 and {MAX_CHOICES}, got {n}.")
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        value = payload.get(name)
        if isinstance(value, int) and value < 1:
            raise invalid(name, f"'{name}' must be at least 1, got {value}.")
    stop = payload.get("stop")
    sequences = [stop] if isinstance(stop, str) else stop
    if sequences is None:
        return
    if not isinstance(sequences, list) or not all(isinstance(s, str) for s in sequences):
        raise invalid("stop", "'stop' must be a string or a list of strings.")
    if len(sequences) > MAX_STOP_SEQUENCES:
        raise invalid("stop", f"'stop' takes at most {MAX_STOP_SEQUENCES} sequences.")
    if any(not 1 <= len(s) <= MAX_STOP_LENGTH for s in sequences):
        raise invalid("stop", f"Each stop sequence must have 1 to {MAX_STOP_LENGTH} characters.")


def check_messages(messages: Any) -> None:
    """Roles and contents as OpenAI defines them; `param` points at the exact message."""
    if messages is None:
        raise invalid("messages", "Missing required parameter: 'messages'.", "missing_parameter")
    if not isinstance(messages, list):
        raise invalid("messages", "'messages' must be a list of messages.")
    if not messages:
        raise invalid("messages", "'messages' must hold at least one message.")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")


def _check_message(message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise invalid(where, f"'{where}' must be an object.")
    role = message.get("role")
    if role not in ROLES:
        raise invalid(
            f"{where}.role", f"Invalid value for '{where}.role': supported are {', '.join(ROLES)}."
        )
    content = message.get("content")
    if content is None:
        if role == "assistant" and (message.get("tool_calls") or message.get("refusal")):
            return
        raise invalid(
            f"{where}.content",
            f"Missing required parameter: '{where}.content'.",
            "missing_parameter",
        )
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise invalid(
            f"{where}.content", f"'{where}.content' must be a string or a list of content parts."
        )
    for index, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise invalid(
                f"{where}.content[{index}]",
                f"'{where}.content[{index}]' must be an object with a 'type'.",
            )


def check_tools(payload: Mapping[str, Any]) -> None:
    """Tools must name a function; a missing `function` is a 500 in stock."""
    tools = payload.get("tools")
    if tools is None:
        return
    if not isinstance(tools, list):
        raise invalid("tools", "'tools' must be a list of tools.")
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise invalid(f"{where}.type", f"'{where}.type' must be 'function'.")
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(
                f"{where}.function", f"'{where}.function' must be an object with a 'name'."
            )
        if not isinstance(function.get("parameters", {}), (dict, type(None))):
            raise invalid(
                f"{where}.function.parameters",
                f"'{where}.function.parameters' must be a JSON schema object.",
            )
