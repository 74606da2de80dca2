"""The dependency of admin routes: `dependencies=[Depends(admin_only)]`."""

from __future__ import annotations

from fastapi import Request

from app.errors import ApiError
from app.http.request_context import context_of
from app.observability import metrics


async def admin_only(request: Request) -> None:
    """Raises ApiError 403 unless the request's key is an admin's."""
    if not context_of(request.scope).identity.admin:
        metrics.REFUSED.labels("admin").inc()
        raise ApiError(403, "This route needs an admin key.", code="admin_required")
