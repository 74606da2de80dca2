"""GET /v1/models and /v1/models/{id}: the model cards."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException

from app.errors import ApiError, shorten
from app.http.errors import without_extra_slashes

router = APIRouter()


def card(request: Request, name: str) -> dict[str, Any]:
    """OpenAI's model object, with the context length that vLLM's server adds."""
    state = request.app.state
    return {
        "id": name,
        "object": "model",
        "created": state.started_at,
        "owned_by": "aerie",
        "max_model_len": state.engine.max_model_len,
    }


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The one model that is served, once for each of its names."""
    names = request.app.state.settings.model_names
    return {"object": "list", "data": [card(request, name) for name in names]}


@router.get("/v1/models/{model:path}")
async def retrieve_model(request: Request, model: str) -> dict[str, Any]:
    """The card of a served model, 404 for any other."""
    if model in request.app.state.settings.model_names:
        return card(request, model)
    path = request.scope["path"]
    if without_extra_slashes(path) != path:
        raise HTTPException(404)
    message = f"The model `{shorten(model)}` does not exist."
    raise ApiError(404, message, param="model", code="model_not_found")
