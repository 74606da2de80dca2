"""How much of what steers sampling vLLM's workers hold for one request. No vllm import.

The V2 model runner has rows of a fixed width for each request, and raises for what does not fit
into them (vllm/v1/worker/gpu/sample, add_request). What a worker raises ends the engine with all of
its requests, so that such a request must not reach it. The bounds are the same on V1, which has no
such rows: what a server accepts does not depend on its start path.
"""

from __future__ import annotations

from typing import Any

# As in vllm/v1/worker/gpu/sample/logit_bias.py.
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_LOGIT_BIAS_TOKENS = 1024
MAX_STOP_TOKEN_IDS = 128
# Seeds are kept in 64 bits (vllm/v1/worker/gpu/sample/states.py). A request's later choices have
# the seeds that follow its own, so app/validation/field_checks.py looks at the last of them.
MAX_SEED = 2**63 - 1


def beyond_worker(params: Any, bad_word_tokens: int) -> tuple[str, str] | None:
    """The field of a request that no worker can hold, and a sentence about it; None if all fits.

    `params` are vLLM's SamplingParams as they go to the engine, with the model's own end tokens and
    the tokens of the bad words. `bad_word_tokens` are those that a worker holds of a request
    (VLLM_MAX_BAD_WORDS_TOTAL_TOKENS).
    """
    allowed, biased = len(params.allowed_token_ids or ()), len(params.logit_bias or ())
    if allowed > MAX_ALLOWED_TOKEN_IDS:
        return _too_many("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS, "tokens", allowed)
    if biased > MAX_LOGIT_BIAS_TOKENS:
        return _too_many("logit_bias", MAX_LOGIT_BIAS_TOKENS, "tokens", biased)
    ends = len(params.all_stop_token_ids)
    if params.min_tokens > 0 and ends > MAX_STOP_TOKEN_IDS:
        what = "tokens beside 'min_tokens', the model's own end tokens included"
        return _too_many("stop_token_ids", MAX_STOP_TOKEN_IDS, what, ends)
    tokens = sum(map(len, params.bad_words_token_ids or ()))
    if tokens > bad_word_tokens:
        what = "tokens in all, counted with and without a space before each word"
        return _too_many("bad_words", bad_word_tokens, what, tokens)
    return None


def _too_many(field: str, most: int, what: str, count: int) -> tuple[str, str]:
    return field, f"'{field}' takes at most {most} {what}: got {count}."
