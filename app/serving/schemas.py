"""JSON schemas of the request bodies: vLLM's request models with the table of fields applied."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)

from app.serving.request_models import ChatRequest, TextRequest
from app.validation.fields import FIELDS, OnlyAt, Rule, SameAs, json_type
from app.validation.speculation_field import FIELD, GENERATES

COMPONENTS = "#/components/schemas/"
MODELS: dict[str, tuple[type[BaseModel], ...]] = {
    "chat": (ChatRequest,),
    "completions": (TextRequest,),
    "responses": (ResponsesRequest,),
    "messages": (AnthropicMessagesRequest,),
    "count_tokens": (AnthropicCountTokensRequest,),
    "tokenize": (TokenizeCompletionRequest, TokenizeChatRequest),
    "detokenize": (DetokenizeRequest,),
}
_SPECULATION = {
    "type": "object",
    "properties": {
        "enabled": {"type": "boolean"},
        "max_k": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]},
        "tokens": {"type": ["boolean", "null"]},
    },
    "additionalProperties": False,
}


def request_schemas() -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Schemas by operation, and the definitions that they refer to under `COMPONENTS`."""
    found: dict[str, dict[str, Any]] = {}
    definitions: dict[str, Any] = {}
    for operation, models in MODELS.items():
        shapes = [_schema(model, operation, definitions) for model in models]
        found[operation] = shapes[0] if len(shapes) == 1 else {"anyOf": shapes}
    return found, definitions


def _schema(model: type[BaseModel], operation: str, definitions: dict[str, Any]) -> dict[str, Any]:
    # Models of different APIs have types of the same name.
    prefix = f"{operation}.{model.__name__}."
    schema = model.model_json_schema(ref_template=f"{COMPONENTS}{prefix}{{model}}")
    for name, definition in schema.pop("$defs", {}).items():
        definitions[prefix + name] = definition
    if operation in GENERATES:
        schema["properties"][FIELD] = _SPECULATION
    for name, rule in FIELDS[operation].items():
        if (described := _described(rule)) is None:
            schema["properties"].pop(name, None)
        else:
            schema["properties"][name] = described
    return {**schema, "additionalProperties": False}  # unknown fields are refused


def _described(rule: Rule) -> dict[str, Any] | None:
    """A field's schema by its rule; None where every value is refused."""
    if isinstance(rule, OnlyAt):
        if not rule.values:
            return None
        return {"enum": [*rule.values, None], "description": f"Nothing else: {rule.why}."}
    effect = f"The same as {rule.name}" if isinstance(rule, SameAs) else "Without effect"
    return {"type": [json_type(rule.kind), "null"], "description": f"{effect}: {rule.why}."}
