"""The prefix under which a proxy shows the gateway (`--root-path`)."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPathMiddleware:
    """Pure ASGI middleware that takes the prefix off the path, in front of everything else.

    Proxies differ in whether they leave it on. Keys, limits and routes compare paths, and all must
    compare the same one: no prefix is left for the router to take off.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        root: str = scope.get("root_path", "")
        if scope["type"] == "http" and root:
            path: str = scope["path"]
            while path == root or path.startswith(f"{root}/"):
                path = path[len(root) :] or "/"
            scope["path"] = path  # in place: what is outside reads the request's id from it
        await self.app(scope, receive, send)
