"""Exception handlers: every path answers with the error envelope of its API."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from app.errors import ApiError, shorten
from app.http.answer_format import format_of
from app.http.request_id import HEADER, id_headers

CLIENT_CLOSED_REQUEST = 499  # what a client would get that has gone; nobody reads it
_SLASHES = re.compile("/+")
_VERSIONS = re.compile("^/v1(/v1)+(?=/)")


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
    """404 and 405 from the router, or the response that leads to the path that was meant."""
    path, method = request.scope["path"], request.method
    headers = dict(error.headers) if error.headers else None
    if error.status_code == 405 and _asks_for_websocket(request):
        message = f"No WebSockets on {shorten(path)}: POST to it over HTTP."
        headers = {"Upgrade": "HTTP/1.1", "Connection": "Upgrade"}  # RFC 9110, section 15.5.22
        return await _api_error(request, ApiError(426, message, headers=headers))
    if error.status_code == 404:
        plain = without_extra_slashes(path)
        if plain != path and _is_routed(request, plain):
            return await _api_error(request, _moved(request, plain))
        unversioned = _VERSIONS.sub("/v1", plain)
        meant = (each for each in (unversioned, f"/v1{plain}") if _is_routed(request, each))
        hint = "".join(f" Did you mean {shorten(each)}?" for each in list(meant)[:1])
        return await _api_error(
            request, ApiError(404, f"Unknown request URL: {method} {shorten(path)}.{hint}")
        )
    message = str(error.detail)
    if error.status_code == 405:
        message = f"Not allowed to {method} on {shorten(path)}."
        headers = {"Allow": ", ".join(sorted(_methods(request)))}
    return await _api_error(request, ApiError(error.status_code, message, headers=headers))


def without_extra_slashes(path: str) -> str:
    """The path without doubled slashes, and without one at its end."""
    return _SLASHES.sub("/", path).rstrip("/") or "/"


def _moved(request: Request, path: str) -> ApiError:
    """The redirect to another path of this gateway, for which clients send the body again.

    Its location has no scheme and no host: only a proxy in front of the gateway knows these.
    """
    query = request.scope["query_string"].decode("latin-1")
    location = quote(request.scope.get("root_path", "") + path) + (f"?{query}" if query else "")
    message = f"Unknown request URL: {request.method} {shorten(request.scope['path'])}."
    return ApiError(307, f"{message} Use {shorten(path)}.", headers={"Location": location})


def _is_routed(request: Request, path: str) -> bool:
    scope = {**request.scope, "path": path}
    return any(route.matches(scope)[0] is not Match.NONE for route in request.app.routes)


def _methods(request: Request) -> set[str]:
    """The methods of all routes of the request's path."""
    methods: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    if "GET" in methods:
        methods.add("HEAD")  # app/http/head.py
    return methods


def _asks_for_websocket(request: Request) -> bool:
    offered = request.headers.getlist("upgrade")
    return any("websocket" in value.lower() for value in offered)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    """Answer an unexpected exception with a 500. The traceback goes to the log, not to the client.

    Starlette calls this handler outside of RequestIdMiddleware, so it adds the request's id itself.
    """
    message = "The server had an error while processing your request."
    return await _api_error(request, ApiError(500, message, headers=id_headers(request.scope)))


def body(request: Request, error: ApiError) -> dict[str, Any]:
    """The error's JSON in the form of the path's API."""
    return format_of(request.scope).error_body(error, id_headers(request.scope).get(HEADER))
