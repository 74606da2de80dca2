"""Draft tokens by an argmax, and verify them by one in batches that are greedy throughout.

vLLM's rejection sampler copies the logits three times before it takes their argmax: to float32,
which keeps their order, to part draft from bonus tokens, and for log probabilities
(vllm/v1/sample/rejection_sampler.py, forward).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor.builtin import (
    LogitBiasLogitsProcessor,
    MinTokensLogitsProcessor,
)

from drafters.ops.argmax import argmax
from drafters.vllm.verification.seeded_sampling import match

# Logits processors that may change an argmax -> their attribute with the requests that use them.
_REQUESTS_OF = {LogitBiasLogitsProcessor: "biases", MinTokensLogitsProcessor: "min_toks"}


def is_pure_greedy(sampling: Any) -> bool:
    """Whether the tokens of a step with the SamplingMetadata `sampling` are the argmax of its raw
    logits, and no log probabilities are asked for."""
    thinking = sampling.thinking_budget_state_holder
    return bool(
        sampling.all_greedy
        and sampling.no_penalties
        and not sampling.bad_words_token_ids
        and sampling.allowed_token_ids_mask is None
        and sampling.max_num_logprobs is None
        and not sampling.logprob_token_ids
        and not (thinking is not None and thinking.has_tracked_requests())
        and not any(map(_is_used, sampling.logitsprocs.non_argmax_invariant))
    )


def verify(
    logits: torch.Tensor,  # [draft tokens + requests, vocabulary]
    metadata: Any,  # SpecDecodeMetadata
) -> SamplerOutput:
    """Verify the drafts of a step that `is_pure_greedy`, with the rejection sampler's result."""
    tokens = argmax(logits)
    sampled = match(
        tokens[metadata.target_logits_indices],
        metadata.draft_token_ids,
        tokens[metadata.bonus_logits_indices].unsqueeze(1),
        metadata.cu_num_draft_tokens,
        metadata.max_spec_len,
    )
    return SamplerOutput(sampled_token_ids=sampled, logprobs_tensors=None)


def _is_used(processor: Any) -> bool:
    """Whether a request of the batch uses the logits processor; assumed of an unknown one."""
    name = _REQUESTS_OF.get(type(processor))
    return name is None or bool(getattr(processor, name))


def greedy_draft_tokens(head: Any, lm_head: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The head's most probable tokens: `[tokens, hidden]` -> token ids `[tokens]`. vLLM would
    scatter a draft vocabulary's logits into a full-vocabulary tensor first (llama_eagle3.py,
    compute_logits).

    Under tensor parallelism each rank has the logits of its part of the vocabulary. Ranks exchange
    their largest one and its token, by vLLM's function for this, instead of all logits: 8 bytes of
    each draft and rank instead of a vocabulary."""
    logits = head.logits_processor
    if lm_head.tp_size > 1 and logits.scale > 0.0:  # what that function can
        return target_ids(head, logits.get_top_tokens(lm_head, hidden))
    return most_probable(head, logits(lm_head, hidden))


def most_probable(head: Any, logits: torch.Tensor) -> torch.Tensor:
    """The most probable tokens of a head's logits `[tokens, draft vocabulary]`: token ids
    `[tokens]`."""
    return target_ids(head, argmax(logits))


def draft_vocabulary(head: Any) -> torch.Tensor | None:
    """The target's id of each of the head's ids: int64 `[draft vocabulary]`; None where a head has
    the target's."""
    offsets = head.draft_id_to_target_id
    return None if offsets is None else torch.arange(len(offsets), device=offsets.device) + offsets


def target_ids(head: Any, ids: torch.Tensor) -> torch.Tensor:
    """The target's ids of draft ids `[tokens]`."""
    offsets = head.draft_id_to_target_id
    return ids if offsets is None else ids + offsets[ids]
