"""Every metric of ours, named once. vLLM's own (`vllm:*`) are exported beside them."""

from __future__ import annotations

from prometheus_client import Gauge

START_SECONDS = Gauge("aerie_start_seconds", "Seconds from process start to ready.")
DRAFT_TOKENS_PER_STEP = Gauge(
    "aerie_draft_tokens_per_step", "Draft tokens per step (K) that the engine was started with."
)
