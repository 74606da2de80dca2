"""GET /page/figures: what the page shows of the running gateway, in one cheap answer.

It makes no call into the engine and no whole scrape: the policy's state is the one that the
gateway's own poll got within the last second, and of vLLM's metrics only those below are collected.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from prometheus_client import REGISTRY

from app.admission.controller import AdmissionController
from app.engine.supervisor import Engine
from app.http.request_context import context_of

PATH = "/page/figures"
# By which the page tells this gateway from another one behind the same load balancer.
GATEWAY = uuid4().hex
# Name in the answer -> sample of vLLM's metrics, summed over engines. The page makes rates of the
# counters, and takes a counter that falls for a new engine's.
SAMPLES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "output_tokens": "vllm:generation_tokens_total",
    "first_tokens": "vllm:time_to_first_token_seconds_count",
    "first_token_s": "vllm:time_to_first_token_seconds_sum",
    "decode_s": "vllm:inter_token_latency_seconds_sum",
}
# The fields of the policy's state that the page shows.
POLICY = (
    "objective", "k", "batch_k", "k_max", "tpot_s", "acceptance", "speedup", "why",
    "available_sources",
)  # fmt: skip
_NAMES = {sample: name for name, sample in SAMPLES.items()}

router = APIRouter(include_in_schema=False)


@router.get(PATH, response_model=None)
async def figures(request: Request) -> JSONResponse:
    """Phase, load, counters, the policy's state and the generations of a head that learns. Needs a
    key where the gateway has keys."""
    engine: Engine = request.app.state.engine
    settings = engine.settings_in_force
    admission: AdmissionController = request.app.state.admission
    state = engine.speculation.latest() if engine.ready and engine.speculation is not None else None
    shown: dict[str, Any] = {
        "gateway": GATEWAY,
        "phase": engine.phase,
        "retry_after_s": None if engine.ready else engine.retry_after_s,
        "model": settings.served_model_name,
        "context": engine.max_model_len,
        "admin": context_of(request.scope).identity.admin,
        "drafts": settings.speculates,
        "tells_tokens": not settings.speculates or settings.speculation.speculation_header,
        "gate_waiting": admission.queue.waiting,
        "kv_usage": engine.load.kv_usage,
        "counters": counters() if engine.ready else None,
        "speculation": None,
        "head": None,
    }
    heads = engine.swappable_heads
    if heads is not None and engine.speculation is not None:
        shown["head"] = {**heads.state(), "drafts": engine.speculation.drafts.rows()}
    if state is not None:
        shown["speculation"] = {name: state[name] for name in POLICY if name in state}
    return JSONResponse(shown)


def counters() -> dict[str, float]:
    """Present values of `SAMPLES`, by their names in the answer."""
    found = dict.fromkeys(SAMPLES, 0.0)
    for family in REGISTRY.restricted_registry(_NAMES).collect():
        for sample in family.samples:
            if (name := _NAMES.get(sample.name)) is not None:
                found[name] += sample.value
    return found
