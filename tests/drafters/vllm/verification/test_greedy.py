"""The fast path for greedy batches returns the same as vLLM's rejection sampler."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, local
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import logits_processor
from vllm.model_executor.layers.logits_processor import LogitsProcessor
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
    asked.seeded_requests = seeded_sampling.SeededRequests(None, {})
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
    with_bias, with_least, unknown = sampling(), sampling(), sampling()
    with_bias.logitsprocs.non_argmax_invariant[0].biases[0] = {1: 5.0}
    with_least.logitsprocs.non_argmax_invariant[1].min_toks[0] = (5, [], {0})
    unknown.logitsprocs.non_argmax_invariant.append(SimpleNamespace())
    assert not any(map(greedy.is_pure_greedy, (with_bias, with_least, unknown)))


@pytest.mark.parametrize("scale", [1.0, 0.5, -1.0])
@pytest.mark.parametrize("mapped", [False, True])
def test_ranks_exchange_their_likeliest_token_instead_of_all_logits(
    scale: float, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks with 13 and 11 tokens of the vocabulary, the second padded to 13, by vLLM's own
    layer. The fault: each rank gathered every draft's logits over the whole vocabulary."""
    torch.manual_seed(0)
    weight, hidden = torch.randn(VOCABULARY, 8), torch.randn(50, 8)
    offsets = torch.randint(0, 9, (VOCABULARY,)) if mapped else None
    parts = [weight[:13], torch.cat([weight[13:], torch.full((2, 8), 1e3)])]
    exchanged: list[Any] = [None, None]
    barrier, here, widths = Barrier(2), local(), set[int]()

    def gather(part: torch.Tensor, dim: int) -> torch.Tensor:
        assert dim == -1
        exchanged[here.rank] = part
        widths.add(part.shape[-1])
        barrier.wait()
        whole = torch.cat(exchanged, dim)
        barrier.wait()
        return whole

    def logits(self: Any, lm_head: Any, hidden: torch.Tensor) -> torch.Tensor:
        local_logits = lm_head.quant_method.apply(lm_head, hidden)[:, : 13 - 2 * here.rank]
        if here.rank == 1:
            local_logits = torch.nn.functional.pad(local_logits, (0, 2), value=-torch.inf)
        return gather(local_logits * scale, -1)[:, :VOCABULARY]

    monkeypatch.setattr(logits_processor, "tensor_model_parallel_all_gather", gather)
    monkeypatch.setattr(LogitsProcessor, "forward", logits)
    with set_current_vllm_config(VllmConfig()):
        processor = LogitsProcessor(VOCABULARY, scale=scale)
    head = SimpleNamespace(logits_processor=processor, draft_id_to_target_id=offsets)

    def rank_tokens(rank: int) -> list[int]:
        here.rank = rank
        shard = SimpleNamespace(num_org_vocab_padding=2 * rank, org_vocab_start_index=13 * rank)
        lm_head = SimpleNamespace(
            tp_size=2,
            shard_indices=shard,
            weight=parts[rank],
            quant_method=SimpleNamespace(apply=lambda layer, x, bias=None: x @ layer.weight.T),
        )
        return greedy.greedy_draft_tokens(head, lm_head, hidden).tolist()

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(rank_tokens, range(2))
    expected = (scale * (hidden @ weight.T)).argmax(-1)
    if offsets is not None:
        expected += offsets[expected]
    assert first == second == expected.tolist()
    assert widths == ({2} if scale > 0 else {13})
