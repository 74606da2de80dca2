"""Where spans go: an OpenTelemetry collector, as far as receiving them over gRPC needs one."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as wire
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as calls

from tests.waiting import until


@dataclass(frozen=True)
class Span:
    """One span, its ids in hexadecimal."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    wire: bytes  # as it came, to look for what must not be in it


@dataclass
class Collector(calls.TraceServiceServicer):
    """What `receiving` hands out."""

    endpoint: str = ""
    spans: list[Span] = field(default_factory=list)

    def Export(self, request: Any, context: Any) -> Any:
        """The one call of OTLP's trace service."""
        for resource in request.resource_spans:
            service = _attributes(resource.resource).get("service.name", "")
            for scope in resource.scope_spans:
                self.spans += [_span(service, one) for one in scope.spans]
        return wire.ExportTraceServiceResponse()

    def wait(self, trace: str, count: int) -> list[Span]:
        """The spans of a trace, the earliest first, once there are `count`."""

        def found() -> list[Span]:
            return [span for span in self.spans if span.trace == trace]

        until(lambda: len(found()) >= count, what=lambda: f"{count} of {trace}: {found()}")
        return found()


@contextmanager
def receiving() -> Iterator[Collector]:
    """A collector on a free port of the loopback address."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(1))
    calls.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def _span(service: str, span: Any) -> Span:
    return Span(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        _attributes(span),
        span.SerializeToString(),
    )


def _attributes(owner: Any) -> dict[str, Any]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in owner.attributes
    }
