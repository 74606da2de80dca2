"""The page's files, built from page/ by `make page` and part of the package."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request, Response

STATIC = Path(__file__).with_name("static")
# URL path -> file. Only these exact paths are served.
FILES = {
    "/": "index.html",
    "/page/app.js": "app.js",
    "/page/app.css": "app.css",
    "/page/icon.svg": "icon.svg",
}
PATHS = frozenset(FILES)
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Scripts, styles and requests of this origin only, nothing inline, and no HTML from text except
# what DOMPurify has cleaned: what a model writes stays text.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # A browser asks each time, and gets a 304 without a body as long as the file is the same.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class StaticFile:
    """A file in memory, with the tag that changes when its bytes do."""

    body: bytes
    etag: str
    media_type: str

    @classmethod
    def read(cls, path: Path) -> StaticFile:
        """The file at `path`."""
        body = path.read_bytes()
        return cls(body, f'"{hashlib.sha256(body).hexdigest()[:32]}"', _TYPES[path.suffix])

    def response(self, known: str) -> Response:
        """The file, or a 304 if `known`, the request's If-None-Match, names it."""
        headers = {**_HEADERS, "ETag": self.etag}
        tags = (tag.strip().removeprefix("W/") for tag in known.split(","))
        if any(tag in (self.etag, "*") for tag in tags):
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers=headers, media_type=self.media_type)


def router() -> APIRouter:
    """Routes of all files, which are read once."""
    routes = APIRouter(include_in_schema=False)

    def add(path: str, file: StaticFile) -> None:
        async def serve(request: Request) -> Response:
            return file.response(request.headers.get("if-none-match", ""))

        routes.add_api_route(path, serve, methods=["GET"], response_model=None)

    for path, name in FILES.items():
        add(path, StaticFile.read(STATIC / name))
    return routes
