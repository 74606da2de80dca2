"""Which draft heads this project's drafters run, and which vLLM's own drafters run."""

from __future__ import annotations

from typing import Any

from vllm import envs


def is_parallel(speculation: Any) -> bool:
    """Whether a vLLM SpeculativeConfig asks for a P-EAGLE head."""
    return speculation is not None and speculation.parallel_drafting and speculation.use_eagle()


def has_own_drafter(speculation: Any) -> bool:
    """Whether a drafter of this project runs the head of a vLLM SpeculativeConfig: any P-EAGLE
    head, and EAGLE-3 heads on the V1 model runner."""
    if is_parallel(speculation):
        return True
    sequential = speculation is not None and speculation.method == "eagle3"
    return sequential and not envs.VLLM_USE_V2_MODEL_RUNNER
