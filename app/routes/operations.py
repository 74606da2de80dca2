"""Routes that run the model or its tokenizer."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from app.errors import ApiError
from app.routes.request_handler import handle, handle_body, read_body

router = APIRouter()

# Path -> operation of app.serving.adapter.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count_tokens",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
# Every path whose requests count towards a tenant's limits.
PATHS = frozenset({*OPERATIONS, "/invocations"})

# Headers that SageMaker hands on from its own API's CustomAttributes and InferenceComponentName.
ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"


def _add(path: str, operation: str) -> None:
    async def route(request: Request) -> Response:
        return await handle(request, operation)

    router.add_api_route(path, route, methods=["POST"], name=operation, response_model=None)


for _path, _operation in OPERATIONS.items():
    _add(_path, _operation)


@router.post("/invocations", response_model=None)
async def invocations(request: Request) -> Response:
    """SageMaker's only route. The operation is that of its header's `route=PATH`, or the body's."""
    if request.headers.get(ADAPTER):
        raise ApiError(400, f"This gateway serves no adapters: {ADAPTER} cannot be honoured.")
    operation = _routed(request.headers.get(ATTRIBUTES, ""))
    body = await read_body(request)
    return await handle_body(request, operation or _operation_of(body.payload), body)


def _routed(attributes: str) -> str | None:
    """The operation that SageMaker's custom attributes name, None without a `route`."""
    for attribute in attributes.replace(";", ",").split(","):
        name, _, path = attribute.strip().partition("=")
        if name.strip() != "route":
            continue
        if path.strip() not in OPERATIONS:
            paths = ", ".join(OPERATIONS)
            raise ApiError(400, f"{ATTRIBUTES}: route must be one of {paths}.", param="route")
        return OPERATIONS[path.strip()]
    return None


def _operation_of(payload: dict[str, Any]) -> str:
    for field, operation in (
        ("messages", "chat"),
        ("prompt", "completions"),
        ("input", "responses"),
    ):
        if payload.get(field) is not None:
            return operation
    raise ApiError(400, "The body needs 'messages', 'prompt' or 'input'.", param="messages")
