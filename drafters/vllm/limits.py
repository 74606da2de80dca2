"""How many tokens may be drafted for a request, from its sampling parameters."""

from __future__ import annotations

from typing import Any

from drafters.config import MAX_K

SMALLEST_MIN_P = 1e-5  # below it vLLM takes min_p for 0 (vllm/sampling_params.py, _SAMPLING_EPS)


def draft_limit(params: Any, k_max: int) -> int:
    """Most draft tokens in a step, 0 to `k_max`.

    Zero for parameters that change the distribution in a way the verification of drafts does
    not know: vLLM applies `logit_bias` and `min_p` to one row per request, not to its drafts
    (vllm/v1/sample/rejection_sampler.py, apply_logits_processors).
    """
    if params is None or params.logit_bias or params.min_p > SMALLEST_MIN_P:
        return 0
    asked = (params.extra_args or {}).get(MAX_K)
    return k_max if asked is None else min(int(asked), k_max)
