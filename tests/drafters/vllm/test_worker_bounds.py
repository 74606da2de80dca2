"""Bounds of what vLLM's workers hold for one request, against the worker's own code."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from vllm import envs
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.states import SamplingStates

from drafters.vllm.worker_bounds import MAX_SEED, beyond_worker

WORD_TOKENS = envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS


def parameters(**given: Any) -> SamplingParams:
    return SamplingParams(max_tokens=8, **given)


def with_ends(ids: int, end_tokens: int, min_tokens: int) -> SamplingParams:
    """Parameters with so many stop ids of the request's and so many end tokens of the model's."""
    params = parameters(stop_token_ids=list(range(ids)), min_tokens=min_tokens)
    params.update_from_generation_config(
        {"eos_token_id": list(range(1000, 1000 + end_tokens))}, 1000
    )
    return params


def with_words(*lengths: int) -> SamplingParams:
    return parameters(_bad_words_token_ids=[[1] * length for length in lengths])


def worker_takes(params: SamplingParams) -> bool:
    """Whether the V2 model runner takes the parameters: its own code, without its buffers."""
    try:
        for state in (LogitBiasState, BadWordsState):
            state.add_request(MagicMock(), 0, params)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("fits", "too_much", "field"),
    [
        (with_ends(126, 2, 1), with_ends(127, 2, 1), "stop_token_ids"),
        (with_ends(1024, 2, 0), with_ends(1024, 2, 1), "stop_token_ids"),
        (
            parameters(allowed_token_ids=list(range(1024))),
            parameters(allowed_token_ids=list(range(1025))),
            "allowed_token_ids",
        ),
        (
            parameters(logit_bias=dict.fromkeys(range(1024), 1.0)),
            parameters(logit_bias=dict.fromkeys(range(1025), 1.0)),
            "logit_bias",
        ),
        (with_words(WORD_TOKENS - 1, 1), with_words(WORD_TOKENS, 1), "bad_words"),
    ],
)
def test_what_the_worker_would_raise_for_is_refused_and_nothing_else(
    fits: SamplingParams, too_much: SamplingParams, field: str
) -> None:
    assert beyond_worker(fits, WORD_TOKENS) is None
    assert worker_takes(fits)
    refused = beyond_worker(too_much, WORD_TOKENS)
    assert refused is not None
    assert refused[0] == field
    assert field in refused[1]
    assert not worker_takes(too_much)


def test_the_workers_seeds_have_64_bits() -> None:
    """vLLM counts up from a request's seed, one for each choice."""
    rows = MagicMock(vocab_size=10)
    rows.seeds.np = np.zeros(1, dtype=np.int64)
    SamplingStates.add_request(rows, 0, parameters(seed=MAX_SEED))
    with pytest.raises(OverflowError):
        SamplingStates.add_request(rows, 0, parameters(seed=MAX_SEED + 1))
