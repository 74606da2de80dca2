"""Liveness, readiness, version and metrics."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from app.admission.controller import AdmissionController
from app.engine.configuration.options import VLLM_VERSION
from app.engine.supervisor import Engine
from app.observability import scrape
from app.observability.exposition import EXPOSITION

router = APIRouter()


@router.get("/livez")
async def livez() -> dict[str, str]:
    """200 while the process answers."""
    return {"status": "ok"}


@router.get("/readyz")
@router.get("/health")  # the name that vLLM's server and its clients use
async def readyz(request: Request) -> JSONResponse:
    """200 once requests are taken, 503 otherwise; both with the engine's phase.

    Both also have the states of background tasks and of the keys file. A task that waits for its
    restart, or a stale keys file, does not make the gateway unready.
    """
    engine: Engine = request.app.state.engine
    admission: AdmissionController = request.app.state.admission
    state: dict[str, Any] = {"status": "ready" if engine.ready else "not ready"}
    state["phase"] = engine.phase
    learning = () if engine.learning is None else engine.learning.background
    state["background"] = {
        task.name: task.detail for task in (*engine.background, *admission.background, *learning)
    }
    if admission.keys.watched:
        state["keys_file"] = "stale" if admission.keys.stale else "current"
    if engine.ready:
        state["drafter"] = engine.drafter
        reason = "none" if engine.fallback is None else engine.fallback.reason
        state["path"] = {"name": engine.path, "reason": reason}
        return JSONResponse(state)
    return JSONResponse(state, 503, headers={"Retry-After": str(engine.retry_after_s)})


@router.get("/ping")
@router.post("/ping")
async def ping(request: Request) -> Response:
    """SageMaker's health check: an empty 200 or 503."""
    return Response(status_code=200 if request.app.state.engine.ready else 503)


@router.get("/version")
async def show_version() -> dict[str, str]:
    """This gateway's version and the engine's."""
    return {"version": version("aerie"), "vllm": VLLM_VERSION}


@router.get("/metrics")
def metrics() -> Response:
    """Prometheus text. A plain function: it runs in a worker thread, off the event loop."""
    return Response(scrape.text(EXPOSITION), media_type=scrape.CONTENT_TYPE)
