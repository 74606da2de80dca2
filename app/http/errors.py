"""Exception handlers: every path answers with the error envelope of its API."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from app.errors import ApiError, shorten
from app.http.answer_format import format_of
from app.http.request_id import HEADER, id_headers

CLIENT_CLOSED_REQUEST = 499  # what a client would get that has gone; nobody reads it


def install(app: FastAPI) -> None:
    """Register the handlers that write the error envelope."""
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(ApiError, _api_error)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _http_error)  # type: ignore[arg-type]
    app.add_exception_handler(Exception, _unexpected)


async def _gone(request: Request, error: Exception) -> Response:
    """The client left while it sent its body: nothing is wrong here."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


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
    """Answer an unexpected exception with a 500. The traceback goes to the log, not to the client.

    Starlette calls this handler outside of RequestIdMiddleware, so it adds the request's id itself.
    """
    message = "The server had an error while processing your request."
    return await _api_error(request, ApiError(500, message, headers=id_headers(request.scope)))


def body(request: Request, error: ApiError) -> dict[str, Any]:
    """The error's JSON in the form of the path's API."""
    return format_of(request.scope).error_body(error, id_headers(request.scope).get(HEADER))
