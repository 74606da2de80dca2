"""The fast path for greedy batches returns the same as vLLM's rejection sampler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vllm is not installed")

from torch import nn
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from drafters.vllm.verification import greedy, seeded_sampling

VOCABULARY = 24
CPU = torch.device("cpu")


def processors() -> LogitsProcessors:
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=8), speculative_config=None
    )
    kinds = (LogitBiasLogitsProcessor, MinTokensLogitsProcessor, MinPLogitsProcessor)
    return LogitsProcessors([kind(config, CPU, False) for kind in kinds])


class Long(RejectionSampler):
    """vLLM's, without the warm-up of GPU kernels that its constructor registers."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.sampler = Sampler()
        self.synthetic_conditional_rates, self.synthetic_mode = None, False
        self.is_processed_logprobs_mode = self.is_logits_logprobs_mode = False
        self.use_fp64_gumbel = False


def sampling(**changes: Any) -> SamplingMetadata:
    empty = torch.tensor([])
    plain: dict[str, Any] = {
        "temperature": None, "all_greedy": True, "all_random": False, "top_p": None,
        "top_k": None, "generators": {}, "max_num_logprobs": None, "no_penalties": True,
        "prompt_token_ids": None, "frequency_penalties": empty, "presence_penalties": empty,
        "repetition_penalties": empty, "output_token_ids": [], "allowed_token_ids_mask": None,
        "bad_words_token_ids": {}, "logitsprocs": processors(),
    }  # fmt: skip
    return SamplingMetadata(**plain | changes)


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=6).filter(any),
    st.sampled_from((torch.float32, torch.bfloat16)),
    st.integers(0, 2**32 - 1),
)
def test_it_gives_the_tokens_of_the_rejection_sampler(
    drafts: list[list[int]], dtype: torch.dtype, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    metadata = SpecDecodeMetadata.make_dummy(drafts, CPU)
    rows = sum(map(len, drafts)) + len(drafts)
    # Few values: drafts are often right, and the largest often there twice.
    logits = torch.randint(0, 4, (rows, VOCABULARY), generator=random).to(dtype)
    logits[:, 3:] -= 2
    assert greedy.is_pure_greedy(sampling())
    got = greedy.verify(logits, metadata).sampled_token_ids
    asked: Any = sampling()
    asked.noise = seeded_sampling.SeededRequests(None, {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rejection_sampler, "rejection_sample", seeded_sampling.accept)
        long = Long()(metadata, None, logits.clone(), asked)
    assert got.tolist() == long.sampled_token_ids.tolist()
    assert got.dtype == long.sampled_token_ids.dtype


@pytest.mark.parametrize(
    "changes",
    [
        {"all_greedy": False},
        {"no_penalties": False},
        {"bad_words_token_ids": {0: [[1]]}},
        {"allowed_token_ids_mask": torch.zeros(1, VOCABULARY, dtype=torch.bool)},
        {"max_num_logprobs": 0},
        {"logprob_token_ids": {0: [1]}},
        {"thinking_budget_state_holder": SimpleNamespace(has_tracked_requests=lambda: True)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_whatever_touches_logits_or_asks_for_them_goes_the_long_way(
    changes: dict[str, Any],
) -> None:
    assert not greedy.is_pure_greedy(sampling(**changes))


def test_a_processor_counts_while_a_request_asks_for_it() -> None:
    bias, tokens, _ = built = processors().non_argmax_invariant + processors().argmax_invariant
    assert isinstance(bias, LogitBiasLogitsProcessor), built
    assert isinstance(tokens, MinTokensLogitsProcessor), built
    with_bias, with_least, unknown = sampling(), sampling(), sampling()
    with_bias.logitsprocs.non_argmax_invariant[0].biases[0] = {1: 5.0}
    with_least.logitsprocs.non_argmax_invariant[1].min_toks[0] = (5, [], {0})
    unknown.logitsprocs.non_argmax_invariant.append(SimpleNamespace())
    assert not any(map(greedy.is_pure_greedy, (with_bias, with_least, unknown)))
