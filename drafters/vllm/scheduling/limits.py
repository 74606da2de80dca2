"""What a request's sampling parameters say about its drafts: how many it may have, and whether the
gateway needs their counts with each output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drafters.config import MAX_K, REPORT_STEPS, REPORT_TOKENS

SMALLEST_MIN_P = 1e-5  # below it vLLM takes min_p for 0 (vllm/sampling_params.py, _SAMPLING_EPS)


def draft_limit(params: Any, k_max: int, *, v2: bool = False) -> int:
    """The largest K of a request with the SamplingParams `params`: 0 to `k_max`.

    On the V1 model runner it is 0 with `logit_bias` and `min_p`: vLLM applies them to one row per
    request, not to the rows of its drafts (vllm/v1/sample/rejection_sampler.py,
    apply_logits_processors). On V2 (`v2`) it applies them to every row
    (vllm/v1/worker/gpu/sample/sampler.py, apply_sampling_params).
    """
    if params is None:
        return 0
    if not v2 and (params.logit_bias or params.min_p > SMALLEST_MIN_P):
        return 0
    asked = (params.extra_args or {}).get(MAX_K)
    return k_max if asked is None else min(int(asked), k_max)


def within_budget(
    drafts: Sequence[int], before: Sequence[int], start: Sequence[int], budget: int
) -> int:
    """How many of the drafts a request may have whose reasoning is to have `budget` tokens, and
    begins with the token ids `start`. `before` is the end of its text, one id shorter than these.

    On the V1 model runner vLLM sees that reasoning began once the target has accepted it, not
    among drafts (vllm/v1/sample/thinking_budget_state.py, _update_think_state). With these drafts
    and the token behind them it has `budget` tokens at most.
    """
    text = [*before, *drafts]
    for end in range(len(start), len(text) + 1):
        if text[end - len(start) : end] == [*start]:
            return min(len(drafts), max(0, end - len(before) + budget - 1))
    return len(drafts)


def follows_counts(params: Any) -> bool:
    """Whether the gateway needs the counts of a request's drafts with each output, not only with
    the last: it may end the request itself, at a stop string, or reports where tokens came from."""
    return params is not None and bool(params.stop or reports_tokens(params))


def reports_tokens(params: Any) -> bool:
    """Whether a request asked where its tokens come from."""
    return params is not None and bool((params.extra_args or {}).get(REPORT_TOKENS))


def reports_steps(params: Any) -> bool:
    """Whether the gateway captures a request, and wants to know the drafts of its steps."""
    return params is not None and bool((params.extra_args or {}).get(REPORT_STEPS))
