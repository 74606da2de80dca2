"""Settings of the HTTP server."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

from pydantic import Field, field_validator

from app.settings.section import Section, names_in

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+")


class ServerSettings(Section):
    """Settings of the HTTP server."""

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    root_path: str = Field(
        "",
        description="Path under which a proxy shows the gateway, as `/llm`, whether or not the "
        "proxy takes it off.",
    )
    max_body_mib: float | None = Field(
        None,
        gt=0,
        description="Largest request body in MiB; larger ones get a 413 (default: 1 MiB and 32 "
        "bytes for each token of the context, at least 16 MiB if the model takes media).",
    )
    max_bodies_mib: float = Field(
        512.0,
        gt=0,
        description="Most MiB of bodies of all requests together, and twice what one of several "
        "tenants may have; beyond it a 429.",
    )
    body_timeout_s: float = Field(
        30.0, gt=0, description="Seconds within which a request's body must have arrived."
    )
    max_header_kib: float = Field(
        32.0, gt=0, description="Largest request line plus headers in KiB; larger ones get a 431."
    )
    max_headers: int = Field(100, ge=1, description="Most headers of a request.")
    header_timeout_s: float = Field(
        10.0, gt=0, description="Seconds within which a request's headers must have arrived."
    )
    write_timeout_s: float = Field(
        30.0,
        gt=0,
        description="Seconds within which a client must read 64 KiB of a full connection, or all "
        "that is left of an answer.",
    )
    idle_timeout_s: float = Field(
        75.0, gt=0, description="Seconds that a connection is kept open between requests."
    )
    max_connections: int = Field(
        8192,  # slots and queue of the largest default batch (2,048) hold 4,608 requests
        ge=1,
        description="Most open connections; further ones get a 503 and are closed, except for 64 "
        "to `public_paths`.",
    )
    page: bool = Field(
        True,
        description="Serve a web page at `/`: chat, race, and live figures of drafting.",
    )
    allowed_origins: str = Field(
        "",
        description="Origins of web pages that may call the gateway from a browser (CORS), "
        "separated by commas, each as SCHEME://HOST[:PORT], or `*` for all; none by default.",
    )
    sse_keep_alive_s: float = Field(
        15.0, gt=0, description="Seconds of silence after which a stream sends an SSE comment."
    )
    stored_responses_mib: float = Field(
        16.0,
        ge=0,
        description="MiB of /v1/responses that each tenant may have in memory for "
        "`previous_response_id`; new ones replace the oldest. 0 keeps none.",
    )
    stored_responses_total_mib: float = Field(
        512.0,
        ge=0,
        description="MiB of /v1/responses that all tenants together may have in memory; beyond it "
        "the tenant with most loses its oldest.",
    )
    stored_responses_s: float = Field(
        3600.0, gt=0, description="Seconds that a response is kept in memory at most."
    )
    drain_timeout_s: float = Field(
        30.0, ge=0, description="Seconds that running requests get to finish after SIGTERM."
    )
    access_log: bool = Field(
        False,
        description="Log one line per request to the model or its tokenizer: id, status, tokens "
        "and times, and none of its text.",
    )
    otlp_traces_endpoint: str | None = Field(
        None,
        description="OpenTelemetry collector for the spans of gateway and engine "
        "(http://HOST:4317 over gRPC, or over HTTP http://HOST:4318/v1/traces); none by default. "
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL chooses otherwise than the path.",
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="Form of the gateway's own log lines; vLLM's are text."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe level that is logged."
    )

    @property
    def origins(self) -> tuple[str, ...]:
        """`allowed_origins` one by one, as browsers write them: in lower case."""
        return names_in(self.allowed_origins)

    @field_validator("root_path")
    @classmethod
    def _check_root_path(cls, value: str) -> str:
        """Drop a slash at the end; refuse what begins no path."""
        if not re.fullmatch(r"(/[^/?#\s]+)*/?", value):
            raise ValueError("must be a path, as /llm")
        return value.rstrip("/")

    @field_validator("allowed_origins", mode="before")
    @classmethod
    def _from_json(cls, value: Any) -> Any:
        """Read a list, which text may hold as a JSON array (vLLM's form)."""
        if isinstance(value, str) and value.startswith("["):
            value = json.loads(value)
        if not isinstance(value, list):
            return value
        if not all(isinstance(each, str) for each in value):
            raise ValueError("must be a list of texts")
        return ",".join(value)

    @field_validator("allowed_origins")
    @classmethod
    def _check_origins(cls, value: str) -> str:
        """Refuse what no browser sends as an origin: it would silently match no page."""
        for name in names_in(value):
            if name != "*" and not _ORIGIN.fullmatch(name):
                raise ValueError(f"{name} is not an origin: SCHEME://HOST[:PORT] without a path")
        return value
