"""Verification on vLLM's V2 model runner by the target's own sample at each position."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from drafters.vllm.v2.request_limits import RequestLimits


class PositionRejectionSampler(RejectionSampler):
    """Accepts a draft if it is the token that the target samples in its place, with noise of the
    request's seed and the position alone.

    The text is then the one that vLLM's sampler makes without drafts, whatever was drafted. vLLM
    accepts a draft with the ratio of the target's probability to the drafter's, and samples another
    token else: a seeded request's text depends on its drafts there, and drafts must not know the
    noise. A draft that is the drafter's most probable token is accepted equally often either way;
    one that was drawn with the position's noise more often (draft_sampling.py).

    Drafts beyond a request's limit are rejected, whatever they are. They are treated as those that
    a grammar does not allow: the target's token takes their place.
    """

    def __init__(self, limits: RequestLimits, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.limits = limits

    @property
    def by_position(self) -> bool:
        """Whether the configuration leaves the way of verification to this class: no block
        verification, synthetic acceptance or watermarks, which remain vLLM's. So do drafts that
        come with their distribution."""
        stock = self.use_block_verification or self.synthetic_conditional_rates is not None
        return not stock and self.watermark_key is None

    def __call__(
        self,
        logits: torch.Tensor,  # [rows, vocabulary]
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,  # bool [rows]
    ) -> SamplerOutput:
        """Verify drafts, of which those beyond a request's limit are invalid."""
        beyond = self.limits.beyond(input_batch)
        if beyond is not None and invalid_drafts is not None:
            beyond = beyond | invalid_drafts
        invalid = invalid_drafts if beyond is None else beyond
        output: SamplerOutput = super().__call__(logits, input_batch, draft_logits, invalid)
        return output

    def _verify(
        self,
        logits: torch.Tensor,  # [rows, vocabulary]
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,  # [rows], the token that each row read
        pos: torch.Tensor,  # [rows], its position
        cu_num_logits: torch.Tensor,  # [requests + 1]
        idx_mapping: torch.Tensor,  # [requests]
        idx_mapping_np: Any,
        expanded_idx_mapping: torch.Tensor,  # [rows]
        expanded_local_pos: torch.Tensor,  # [rows]
        seq_lens_upper_bound_np: Any,
        verify_draft_sampled: torch.Tensor,  # as `draft_sampled`, -1 for drafts to be rejected
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits as the sampler shapes them, and each request's tokens `[requests, K + 1]`, with
        how many of them count: int32 `[requests]`."""
        if draft_logits is not None or not self.by_position:
            stock: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = super()._verify(
                logits, draft_logits, draft_sampled, pos, cu_num_logits, idx_mapping,
                idx_mapping_np, expanded_idx_mapping, expanded_local_pos, seq_lens_upper_bound_np,
                verify_draft_sampled,
            )  # fmt: skip
            return stock
        processed = self.sampler.apply_sampling_params(
            logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, draft_sampled,
            expanded_local_pos, seq_lens_upper_bound_np,
        )  # fmt: skip
        states = self.sampler.sampling_states
        tokens = gumbel_sample(
            processed, expanded_idx_mapping, states.temperature.gpu, states.seeds.gpu, pos,
            apply_temperature=False, is_drafting=False, use_fp64=self.sampler.use_fp64_gumbel,
        )  # fmt: skip
        steps = self.num_speculative_steps
        return processed, *match(tokens, verify_draft_sampled, cu_num_logits, steps)


def match(
    tokens: torch.Tensor,  # int64 [rows], what the target samples behind each row
    read: torch.Tensor,  # [rows], what each row read: a request's newest token, then its drafts
    starts: torch.Tensor,  # [requests + 1], first row of each request, and the end
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each request's tokens `[requests, k + 1]`, and how many of them count, int32 `[requests]`:
    those up to the first that differs from its draft."""
    rows = starts[:-1, None] + torch.arange(k + 1, device=tokens.device)
    last = len(tokens) - 1  # a request with fewer drafts reads past its end; that is unused
    own = tokens[rows.clamp(max=last)]
    drafts = read[(rows + 1).clamp(max=last)]
    right = (rows < starts[1:, None] - 1) & (own == drafts)
    return own, 1 + right.int().cumprod(1, dtype=torch.int32).sum(1, dtype=torch.int32)
