"""EAGLE-3 in vLLM's V2 model runner: vLLM's own speculator, whose pass at K = 0 is put off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from drafters.vllm.v2.deferring import DeferringSpeculator


class SequentialSpeculator(DeferringSpeculator, EagleSpeculator):
    """vLLM's speculator (v1/worker/gpu/spec_decode/target_dependent_ar), with its CUDA graphs.

    Its first pass enters what the target read in the step and drafts one token, and K - 1 more
    passes draft the others. vLLM runs the first one at K = 0 too, to keep the head's KV cache in
    step: a layer, `fc` and the logits of each request. Here the hidden states of such steps are
    kept, and entered by a pass before the next one of vLLM's.
    """

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,  # [tokens, hidden]
        aux_hidden_states: list[torch.Tensor] | None,  # taps of [tokens, hidden]
        *args: Any,
        num_speculative_tokens: int | None = None,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draft after a step, as vLLM's; the other arguments are those of
        `ParallelSpeculator.propose`. The drafts at K = 0 mean nothing."""
        states = aux_hidden_states or [last_hidden_states]
        if not skip_attn_for_dummy_run:
            self._warm_up(states)
        if not dummy_run:
            if num_speculative_tokens == 0 and self._defer(input_batch, states):
                return self.draft_tokens[: input_batch.num_reqs]
            self._catch_up(input_batch, states)
            self._refresh_sampling(input_batch)
        drafts: torch.Tensor = super().propose(
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            *args,
            num_speculative_tokens=num_speculative_tokens,
            dummy_run=dummy_run,
            skip_attn_for_dummy_run=skip_attn_for_dummy_run,
            **kwargs,
        )
        return drafts

    def sample_draft(
        self,
        hidden_states: torch.Tensor,  # [drafts, hidden]
        sample_src_positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        draft_step: torch.Tensor,
        draft_logits: torch.Tensor | None,
        spec_step_idx: int = 0,
    ) -> torch.Tensor:
        """The next draft of each request: `[drafts]`. vLLM's where it needs their distribution;
        else ours, without scattering logits over the target's vocabulary."""
        if draft_logits is None and self.acceptance_estimator is None:
            return self._choose(hidden_states, idx_mapping, sample_src_positions)
        drafts: torch.Tensor = super().sample_draft(
            hidden_states, sample_src_positions, idx_mapping, temperature, seeds, draft_step,
            draft_logits, spec_step_idx,
        )  # fmt: skip
        return drafts

    def _pass(
        self,
        batch: InputBatch,
        states: Sequence[torch.Tensor],
        rejected: torch.Tensor | None,
        k: int,
        *,
        dummy_held: int | None = None,
    ) -> None:
        """Catch up, and leave the slots of the step's tokens as they are: vLLM's first pass reads
        them from the same buffer."""
        slots = self.block_tables.slot_mappings[self.group]
        of_step = slots.clone()
        super()._pass(batch, states, rejected, k, dummy_held=dummy_held)
        slots.copy_(of_step)

    def _forward(
        self,
        tokens: int,
        metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        across: torch.Tensor | None,
        mode: CUDAGraphMode,
    ) -> torch.Tensor:
        last: torch.Tensor = self._run_model(tokens, metadata, slot_mappings, across, mode)[0]
        return last
