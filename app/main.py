"""The composition root: builds the FastAPI application from settings and an engine."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.metadata import version
from itertools import product

import psutil
from fastapi import FastAPI

from app.admission.controller import AdmissionController
from app.declaration.endpoint import answers_for
from app.endpoints import declared
from app.engine.configuration.options import VLLM_VERSION
from app.engine.supervisor import Engine
from app.http import cors, errors
from app.http.access_log import AccessLogMiddleware
from app.http.auth import AuthMiddleware
from app.http.head import HeadMiddleware
from app.http.request_id import RequestIdMiddleware
from app.learning.learning import Learning
from app.observability import metrics
from app.page import figures, files
from app.routes import health, models, openapi, operations, speculation, stored_responses
from app.routes.response_store import ResponseStore
from app.routes.root_path import RootPathMiddleware
from app.settings import Settings

logger = logging.getLogger(__name__)


def create_app(settings: Settings, engine: Engine) -> FastAPI:
    """Build the application. Its lifespan starts the engine in the background and stops it.

    Raises SettingsError if a folder of the settings cannot be used.
    """

    admission = AdmissionController(settings, engine.load)
    engine.load.on_step = admission.queue.dispatch
    folder = settings.learning.learn
    learning = engine.learning = None
    if folder is not None:
        learning = engine.learning = Learning(folder, settings, admission.excluded_from_capture)
    heads = engine.heads
    if learning is not None and heads is not None:
        learning.capture.generation = lambda: heads.generation
    closing: list[Callable[[], None]] = []  # may block; called once nothing runs any more

    def on_ready() -> None:
        _announce()
        if learning is not None and engine.settings_in_force.has_head:
            learning.start_learner()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if learning is not None:
                await stack.enter_async_context(learning.open())
            running = asyncio.create_task(engine.run(on_ready))
            try:
                async with admission.open():
                    yield
            finally:
                await engine.stop()
                await running
                for close in closing:
                    await asyncio.to_thread(close)

    app = FastAPI(
        title="Aerie",
        version=version("aerie"),
        lifespan=lifespan,
        root_path=settings.server.root_path,
        redirect_slashes=False,  # app/http/errors.py leads to the path that was meant
    )
    metrics.BUILD_INFO.labels(version("aerie"), VLLM_VERSION).set(1)
    metrics.MODEL_INFO.labels(settings.served_model_name).set(1)
    app.state.settings = settings
    app.state.engine = engine
    app.state.admission = admission
    app.state.started_at = int(time.time())
    endpoints = declared()
    metered = operations.metered_paths(endpoints)
    for path, status in product(metered, ("500", "503", "504")):
        metrics.RESPONSES.labels(path, status)  # a rate of failures needs a 0 before the first
    app.state.responses = ResponseStore(
        int(settings.server.stored_responses_mib * 2**20),
        settings.server.stored_responses_s,
        total_bytes=int(settings.server.stored_responses_total_mib * 2**20),
    )
    app.include_router(operations.router(endpoints))
    for module in (stored_responses, models, speculation, health):
        app.include_router(module.router)
    if settings.server.page:
        app.include_router(files.router())
        app.include_router(figures.router)
    errors.install(app)
    openapi.install(app, engine, endpoints)
    app.add_middleware(
        AuthMiddleware,
        admission=admission,
        serves=lambda: engine.ready,
        metered=metered,
        public=files.PATHS if settings.server.page else frozenset(),
    )
    app.add_middleware(
        AccessLogMiddleware,
        paths=metered,
        log=settings.server.access_log,
        model=settings.served_model_name,
    )
    if settings.server.otlp_traces_endpoint is not None:
        from app.http import tracing  # loads OpenTelemetry, which nothing else needs

        spans = tracing.provider(tracing.exporter(settings.server.otlp_traces_endpoint, os.environ))
        closing.append(spans.shutdown)
        app.add_middleware(
            tracing.TracingMiddleware,
            provider=spans,
            paths=metered,
            operations={
                each.path: each.trace_operation
                for each in endpoints
                if each.trace_operation is not None
            },
            model=settings.served_model_name,
        )
    app.add_middleware(HeadMiddleware)
    app.add_middleware(RequestIdMiddleware, answers=partial(answers_for, endpoints=endpoints))
    cors.install(app, settings)
    app.add_middleware(RootPathMiddleware)
    return app


def _announce() -> None:
    seconds = time.time() - psutil.Process().create_time()
    metrics.START_SECONDS.set(seconds)
    logger.info("ready in %.1f s", seconds)
