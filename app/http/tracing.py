"""OpenTelemetry tracing: a span for each request that runs the model or its tokenizer.

The span is in the client's trace if there is one, and the engine's spans are its children. The
module is only loaded when tracing is on. OpenTelemetry's own environment variables apply: sampler,
service name, headers of the exporter.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.sdk.environment_variables import OTEL_SERVICE_NAME
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import SettingsError
from app.http import request_context, request_id
from app.request_usage import set_trace_headers

PROVIDER = "aerie"
_W3C = TraceContextTextMapPropagator()
_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_HTTP_PATH = "/v1/traces"  # of OTLP over HTTP; gRPC has no path
# Access log fields that OpenTelemetry has names for.
_NAMES = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
}


def provider(exporter: SpanExporter) -> TracerProvider:
    """The provider of spans. Its `shutdown` exports the rest and may block for seconds."""
    os.environ.setdefault(OTEL_SERVICE_NAME, "aerie")  # vLLM, in three processes, reads it as well
    provider = TracerProvider(resource=Resource.create())
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def exporter(endpoint: str, environ: MutableMapping[str, str]) -> SpanExporter:
    """An exporter like vLLM's own for the same endpoint.

    The environment names the protocol. Where it does not, that is HTTP for an endpoint with the
    path of OTLP over HTTP, else gRPC, and it is put there for vLLM, whose processes read it too.
    Raises SettingsError for another protocol.
    """
    over_http = urlsplit(endpoint).path.rstrip("/").endswith(_HTTP_PATH)
    protocol = environ.setdefault(_PROTOCOL, "http/protobuf" if over_http else "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(endpoint=endpoint, insecure=True)
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

        return Http(endpoint=endpoint)
    raise SettingsError(_PROTOCOL, f"{protocol} is not one of grpc, http/protobuf")


class TracingMiddleware:
    """Pure ASGI middleware that makes a span for each request on one of `paths`.

    Spans have ids, counts and times, and no text of a request. `operations` maps some of the paths
    to their operation in OpenTelemetry's GenAI conventions; their spans are named after it and the
    model.
    """

    def __init__(
        self,
        app: ASGIApp,
        provider: TracerProvider,
        paths: frozenset[str],
        operations: Mapping[str, str],
        model: str,
    ) -> None:
        self.app = app
        self._tracer = provider.get_tracer("aerie")
        self._paths = paths
        self._operations = operations
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        parent = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        # An exception's message may quote the request.
        with self._tracer.start_as_current_span(
            self._name(scope),
            _W3C.extract(parent),
            SpanKind.SERVER,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            carried: dict[str, str] = {}
            _W3C.inject(carried)
            set_trace_headers(carried)

            def record_status(status: int) -> None:
                span.set_attribute("http.response.status_code", status)
                if status >= 500:
                    span.set_status(Status(StatusCode.ERROR))

            async def send_and_record_status(message: Message) -> None:
                if message["type"] == "http.response.start":
                    record_status(message["status"])
                await send(message)

            try:
                await self.app(scope, receive, send_and_record_status)
            except Exception:  # answered with a 500 further out (app/http/errors.py)
                record_status(500)
                raise
            finally:
                self._describe(span, scope)

    def _name(self, scope: Scope) -> str:
        """`chat MODEL` for generation, as the GenAI conventions have it; else method and route."""
        operation = self._operations.get(scope["path"])
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
        if operation := self._operations.get(scope["path"]):
            attributes["gen_ai.operation.name"] = operation
        if (number := request_id.id_headers(scope).get(request_id.HEADER)) is not None:
            attributes["aerie.request_id"] = number
        for name, value in request_context.log_fields_of(scope).items():
            attributes[_NAMES.get(name, f"aerie.{name}")] = value
        span.set_attributes(attributes)


def _method(scope: Scope) -> str:
    """The HTTP method, `_OTHER` for one that a client made up."""
    methods = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
    return scope["method"] if scope["method"] in methods else "_OTHER"
