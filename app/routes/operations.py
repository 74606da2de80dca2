"""Routes of the endpoints that run the model or its tokenizer, and SageMaker's route to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from app.declaration.endpoint import Endpoint
from app.errors import ApiError
from app.routes.request_handler import handle, handle_body, read_body, refuse_until_ready

INVOCATIONS = "/invocations"
# Headers that SageMaker hands on from its own API's CustomAttributes and InferenceComponentName.
ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"


def metered_paths(endpoints: Sequence[Endpoint]) -> frozenset[str]:
    """Every path whose requests count towards a tenant's limits."""
    return frozenset({*(endpoint.path for endpoint in endpoints), INVOCATIONS})


def router(endpoints: Sequence[Endpoint]) -> APIRouter:
    """A route for each endpoint, and `INVOCATIONS`, which leads to all of them."""
    routes = APIRouter()
    for endpoint in endpoints:
        _add(routes, endpoint)
    by_path = {endpoint.path: endpoint for endpoint in endpoints}
    by_field = {
        endpoint.invocation_field: endpoint
        for endpoint in endpoints
        if endpoint.invocation_field is not None
    }

    @routes.post(INVOCATIONS, response_model=None)
    async def invocations(request: Request) -> Response:
        """SageMaker's only route. `route=PATH` in its header, or a field of the body, names the
        endpoint."""
        if request.headers.get(ADAPTER):
            raise ApiError(400, f"This gateway serves no adapters: {ADAPTER} cannot be honoured.")
        endpoint = _routed(request.headers.get(ATTRIBUTES, ""), by_path)
        refuse_until_ready(request, endpoint or endpoints[0])
        body = await read_body(request)
        if endpoint is None:
            endpoint = _endpoint_by_field(body.payload, by_field)
        return await handle_body(request, endpoint, body)

    return routes


def _add(routes: APIRouter, endpoint: Endpoint) -> None:
    async def route(request: Request) -> Response:
        return await handle(request, endpoint)

    routes.add_api_route(
        endpoint.path, route, methods=["POST"], name=endpoint.name, response_model=None
    )


def _routed(attributes: str, by_path: Mapping[str, Endpoint]) -> Endpoint | None:
    """The endpoint that SageMaker's custom attributes name, None without a `route`."""
    for attribute in attributes.replace(";", ",").split(","):
        name, _, path = attribute.strip().partition("=")
        if name.strip() != "route":
            continue
        if path.strip() not in by_path:
            paths = ", ".join(by_path)
            raise ApiError(400, f"{ATTRIBUTES}: route must be one of {paths}.", param="route")
        return by_path[path.strip()]
    return None


def _endpoint_by_field(payload: Mapping[str, Any], by_field: Mapping[str, Endpoint]) -> Endpoint:
    """The endpoint that a field of the body stands for. Raises ApiError 400 if none does."""
    for field, endpoint in by_field.items():
        if payload.get(field) is not None:
            return endpoint
    *others, last = (f"'{field}'" for field in by_field)
    names = f"{', '.join(others)} or {last}" if others else last
    raise ApiError(400, f"The body needs {names}.", param=next(iter(by_field)))
