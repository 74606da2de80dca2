"""Every metric of ours, named once. vLLM's own (`vllm:*`) are exported beside them."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

START_SECONDS = Gauge("aerie_start_seconds", "Seconds from process start to ready.")
DRAFT_TOKENS_PER_STEP = Gauge(
    "aerie_draft_tokens_per_step", "Draft tokens per step (K) that the engine was started with."
)

# Labels are ours or the operator's: nothing that a client sends becomes one.
REFUSED = Counter(
    "aerie_requests_refused_total", "Requests refused before they reached the engine.", ["reason"]
)
EXPIRED = Counter(
    "aerie_requests_expired_total", "Requests ended by a deadline of the gateway.", ["deadline"]
)
GATE_WAITING = Gauge("aerie_gate_waiting", "Requests that wait at the gate.")
GATE_RUNNING = Gauge("aerie_gate_running", "Sequences that the gate has let in.")
TENANT_TOKENS = Counter("aerie_tenant_tokens_total", "Tokens used.", ["tenant", "kind"])
KEY_RELOADS = Counter("aerie_key_reloads_total", "Times the keys file was read again.", ["result"])
LIMITER_FALLBACKS = Counter(
    "aerie_limiter_fallbacks_total", "Decisions made without the shared Redis."
)
CONNECTIONS_REFUSED = Counter(
    "aerie_connections_refused_total", "Connections closed for what they did.", ["reason"]
)
