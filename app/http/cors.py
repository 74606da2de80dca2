"""Cross-origin resource sharing (CORS): which web pages may call the gateway from a browser."""

from __future__ import annotations

import logging

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from app.settings import Settings

logger = logging.getLogger(__name__)

# PATCH is left out: it is the admin's, and no page needs it.
METHODS = ("DELETE", "GET", "HEAD", "POST")
# Response headers that a page's script may read, beyond the few that every script may.
EXPOSED_HEADERS = (
    "request-id",
    "retry-after",
    "server-timing",
    "www-authenticate",
    "x-aerie-speculation",
    "x-request-id",
    "x-should-retry",
    *(
        f"x-ratelimit-{figure}-{kind}"
        for kind in ("requests", "tokens")
        for figure in ("limit", "remaining", "reset")
    ),
)


def install(app: FastAPI, settings: Settings) -> None:
    """Let pages of `--allowed-origins` call the gateway; without that setting, change nothing.

    The middleware goes around everything else, Starlette's own 500 included: a preflight carries no
    key, and a script can read a refusal only if it has the CORS headers.
    Cookies play no part, since keys travel in headers (`allow_credentials` stays off).
    """
    origins = settings.server.origins
    if not origins:
        return
    if "*" in origins and not settings.admission.guarded:
        logger.warning(
            "--allowed-origins * without API keys: any web page that is open in a browser which "
            "reaches this port can use it (see --keys-file)"
        )
    build = app.build_middleware_stack

    def build_with_cors() -> ASGIApp:
        return CORSMiddleware(
            build(),
            allow_origins=origins,
            allow_methods=METHODS,
            allow_headers=("*",),  # SDKs send headers of their own (x-stainless-*)
            allow_private_network=True,  # a listed page may call a gateway on its user's machine
            expose_headers=EXPOSED_HEADERS,
        )

    app.build_middleware_stack = build_with_cors  # type: ignore[method-assign]
