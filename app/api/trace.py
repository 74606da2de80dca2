"""A span for each request for work, in the client's trace if it has one; the engine's is its child.

Only loaded when spans are asked for. OpenTelemetry's own environment variables hold: sampler,
service name, headers of the exporter.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from opentelemetry.sdk.environment_variables import OTEL_SERVICE_NAME
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api import request_id, visit
from app.engine.account import open_trace
from app.errors import SettingsError

# Path -> operation in the GenAI conventions' words; a span of one is named after it and the model.
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
}
PROVIDER = "aerie"
_W3C = TraceContextTextMapPropagator()
_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
# Of a visit's figures, those that OpenTelemetry has names for.
_NAMES = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
}


def provider(exporter: SpanExporter) -> TracerProvider:
    """Where spans are made; its `shutdown` sends what is left, and may block for seconds."""
    os.environ.setdefault(OTEL_SERVICE_NAME, "aerie")  # vLLM, in three processes, reads it as well
    made = TracerProvider(resource=Resource.create())
    made.add_span_processor(BatchSpanProcessor(exporter))
    return made


def exporter(endpoint: str, environ: Mapping[str, str]) -> SpanExporter:
    """As vLLM makes its own for the same endpoint: gRPC, or HTTP if the environment says so.
    Raises SettingsError for another protocol."""
    protocol = environ.get(_PROTOCOL, "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(endpoint=endpoint, insecure=True)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

        return Http(endpoint=endpoint)
    raise SettingsError(_PROTOCOL, f"{protocol} is not one of grpc, http/protobuf")


class Trace:
    """Pure ASGI middleware. Spans have ids, counts and times, and no text of a request."""

    def __init__(
        self, app: ASGIApp, provider: TracerProvider, paths: frozenset[str], model: str
    ) -> None:
        self.app = app
        self._tracer = provider.get_tracer("aerie")
        self._paths = paths
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        with self._tracer.start_as_current_span(
            self._name(scope), _W3C.extract(given), SpanKind.SERVER
        ) as span:
            carried: dict[str, str] = {}
            _W3C.inject(carried)
            open_trace(carried)

            async def send_and_note(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(Status(StatusCode.ERROR))
                await send(message)

            try:
                await self.app(scope, receive, send_and_note)
            finally:
                self._describe(span, scope)

    def _name(self, scope: Scope) -> str:
        """`chat MODEL` for generation, as the GenAI conventions have it; else method and route."""
        operation = OPERATIONS.get(scope["path"])
        return f"{operation} {self._model}" if operation else f"{_method(scope)} {scope['path']}"

    def _describe(self, span: Span, scope: Scope) -> None:
        attributes: dict[str, Any] = {
            "http.request.method": _method(scope),
            "http.route": scope["path"],  # one of a fixed set without variables
            "url.path": scope["path"],
            "url.scheme": scope.get("scheme", "http"),
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model,  # any other is a 404
            "gen_ai.response.model": self._model,
        }
        if operation := OPERATIONS.get(scope["path"]):
            attributes["gen_ai.operation.name"] = operation
        if (number := request_id.given_to(scope).get(request_id.HEADER)) is not None:
            attributes["aerie.request_id"] = number
        for name, value in visit.figures_of(scope).items():
            attributes[_NAMES.get(name, f"aerie.{name}")] = value
        span.set_attributes(attributes)


def _method(scope: Scope) -> str:
    """A method that is not one of HTTP's own is text of the client's."""
    known = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
    return scope["method"] if scope["method"] in known else "_OTHER"
