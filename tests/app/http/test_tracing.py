"""Spans: in the client's trace, above the engine's, and without a word of the request."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.types import Message, Receive, Scope, Send

from app import request_usage
from app.endpoints import declared
from app.errors import SettingsError
from app.http import tracing
from app.http.request_id import RequestIdMiddleware

PATH = "/v1/completions"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


def request(
    headers: dict[str, str], status: int = 200, path: str = PATH, method: str = "POST"
) -> tuple[list[ReadableSpan], list[object]]:
    """The spans of one request, and what the engine would be told."""
    told: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        told.append(await asyncio.create_task(engine()))  # a stream has a task of its own
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def engine() -> object:
        return request_usage.trace_headers()

    async def send(message: Message) -> None:
        pass

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    kept = InMemorySpanExporter()
    provider = tracing.provider(kept)
    scope = {
        "type": "http", "path": path, "method": method,
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip
    layers = RequestIdMiddleware(
        tracing.TracingMiddleware(
            app, provider, frozenset({PATH}), {PATH: "text_completion"}, "the-model"
        )
    )
    asyncio.run(layers(scope, receive, send))
    provider.shutdown()
    return list(kept.get_finished_spans()), told


def test_a_span_continues_the_clients_trace_and_the_engine_continues_the_span() -> None:
    [span], [told] = request({"traceparent": PARENT, "x-request-id": "abc", "user-agent": "marker"})
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    assert told == {"traceparent": f"00-{TRACE_ID}-{span.context.span_id:016x}-01"}
    assert span.name == "text_completion the-model"
    assert dict(span.attributes or {}) == {
        "http.request.method": "POST", "http.route": PATH, "url.path": PATH, "url.scheme": "http",
        "http.response.status_code": 200, "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "aerie", "gen_ai.request.model": "the-model",
        "gen_ai.response.model": "the-model", "aerie.request_id": "abc",
    }  # fmt: skip
    assert "marker" not in span.to_json()


@pytest.mark.parametrize("parent", ["", "marker", f"00-{'0' * 32}-{PARENT_ID}-01"])
def test_a_bad_parent_begins_a_trace_of_its_own(parent: str) -> None:
    [span], [told] = request({"traceparent": parent})
    assert span.parent is None
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" in str(told)
    assert "marker" not in span.to_json()


def test_what_the_client_does_not_want_sampled_is_not() -> None:
    spans, [told] = request({"traceparent": PARENT[:-2] + "00"})
    assert not spans
    assert str(told).endswith("-00'}")


def test_a_failure_is_marked_and_a_strange_method_is_not_quoted() -> None:
    [span], _ = request({}, status=503, method="MARKER")
    assert not span.status.is_ok
    assert (span.attributes or {})["http.request.method"] == "_OTHER"


def test_an_unexpected_error_is_marked_and_not_quoted() -> None:
    """Its message may quote the request."""
    kept = InMemorySpanExporter()
    provider = tracing.provider(kept)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("cannot read MARKER")

    async def nothing(*_: object) -> Message:
        return {"type": "http.disconnect"}

    traced = tracing.TracingMiddleware(app, provider, frozenset({PATH}), {}, "the-model")
    scope = {"type": "http", "path": PATH, "method": "POST", "headers": []}
    with pytest.raises(RuntimeError):
        asyncio.run(RequestIdMiddleware(traced)(scope, nothing, nothing))
    provider.shutdown()
    [span] = kept.get_finished_spans()
    assert not span.status.is_ok
    assert (span.attributes or {})["http.response.status_code"] == 500
    assert "MARKER" not in span.to_json()


def test_names_are_those_of_the_conventions() -> None:
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as names
    from opentelemetry.semconv.attributes import http_attributes, url_attributes

    [span], _ = request({})
    known = {
        names.GEN_AI_OPERATION_NAME, names.GEN_AI_PROVIDER_NAME, names.GEN_AI_REQUEST_MODEL,
        names.GEN_AI_RESPONSE_MODEL, http_attributes.HTTP_REQUEST_METHOD,
        http_attributes.HTTP_RESPONSE_STATUS_CODE, http_attributes.HTTP_ROUTE,
        url_attributes.URL_PATH, url_attributes.URL_SCHEME,
    }  # fmt: skip
    assert {name for name in span.attributes or {} if not name.startswith("aerie.")} == known
    operations = {value.value for value in names.GenAiOperationNameValues}
    named = {endpoint.trace_operation for endpoint in declared()}
    assert named - {None} <= operations
    assert len(named) > 1


def test_other_paths_have_none() -> None:
    spans, [told] = request({"traceparent": PARENT}, path="/metrics")
    assert not spans
    assert told is None


def test_the_protocol_is_one_that_the_engine_knows() -> None:
    with pytest.raises(SettingsError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"):
        tracing.exporter("http://127.0.0.1:4317", {tracing._PROTOCOL: "http/json"})
    for protocol in ({}, {tracing._PROTOCOL: "http/protobuf"}):
        tracing.exporter("http://127.0.0.1:4317", protocol).shutdown()


@pytest.mark.parametrize(
    ("endpoint", "environment", "protocol"),
    [
        ("http://127.0.0.1:4317", {}, "grpc"),
        ("http://127.0.0.1:4318/v1/traces", {}, "http/protobuf"),
        ("https://collector/otlp/v1/traces/", {}, "http/protobuf"),
        ("http://127.0.0.1:4318/v1/traces", {tracing._PROTOCOL: "grpc"}, "grpc"),
    ],
)
def test_the_path_of_otlp_over_http_chooses_http(
    endpoint: str, environment: dict[str, str], protocol: str
) -> None:
    """Catches: an address over HTTP as docs/settings.md has it, to which gateway and engine speak
    gRPC, so that no span arrives."""
    exporter = tracing.exporter(endpoint, environment)
    assert (".http." in type(exporter).__module__) == (protocol == "http/protobuf")
    assert environment[tracing._PROTOCOL] == protocol
    exporter.shutdown()
