"""Exception handlers: one error envelope on every path, Anthropic's own on its paths."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from app.errors import ApiError, shorten
from app.http.request_id import ANTHROPIC_PATH, HEADER, id_headers

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def install(app: FastAPI) -> None:
    """Register the handlers that write the error envelope."""
    app.add_exception_handler(ApiError, _api_error)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _http_error)  # type: ignore[arg-type]
    app.add_exception_handler(Exception, _unexpected)


async def _api_error(request: Request, error: ApiError) -> JSONResponse:
    return JSONResponse(body(request, error), status_code=error.status, headers=error.headers)


async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
    """404 and 405 from the router."""
    path, method = shorten(request.url.path), request.method
    message = {
        404: f"Unknown request URL: {method} {path}.",
        405: f"Not allowed to {method} on {path}.",
    }.get(error.status_code, str(error.detail))
    headers = dict(error.headers) if error.headers else None
    if headers is not None and headers.get("Allow") == "GET":
        headers["Allow"] = "GET, HEAD"  # app/http/head.py
    return await _api_error(request, ApiError(error.status_code, message, headers=headers))


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    """A defect of ours. The traceback goes to the log, not to the client.

    The only handler that answers from outside of the RequestIdMiddleware middleware.
    """
    message = "The server had an error while processing your request."
    return await _api_error(request, ApiError(500, message, headers=id_headers(request.scope)))


def body(request: Request, error: ApiError) -> dict[str, Any]:
    """The error's JSON in the dialect of the route."""
    if not request.url.path.startswith(ANTHROPIC_PATH):
        return error.envelope()
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_TYPES.get(error.status, default)
    content: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": error.message}}
    if (request_id := id_headers(request.scope).get(HEADER)) is not None:
        content["request_id"] = request_id
    return content
