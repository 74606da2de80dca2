"""Sampling whose randomness depends on seed and position alone, and verification of drafts by it.

vLLM draws from a request's generator as often as a step has drafts, so that the text of a seeded
request depends on what was drafted and accepted. Here the token at a position is sampled with
noise made from the request's seed and that position, and a draft is accepted if it is that token.
The drafter proposes its most probable token, not a distribution. A draft is therefore accepted with
the target's probability of it, exactly as often as by rejection sampling with a one-hot draft
distribution (arXiv 2211.17192), and the text is the one that is sampled without any drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.sample import rejection_sampler

from drafters.ops.argmax import argmax
from drafters.vllm.verification import synthetic

MASK = 2**64 - 1
_stock_rejection_sample = rejection_sampler.rejection_sample


@dataclass(frozen=True)
class SeededRequests:
    """The seeded requests of a step, and the sampler for their tokens."""

    sampler: Any  # this platform's TopKTopPSampler of vLLM
    seeds: dict[int, tuple[int, int]]  # row -> (seed, position of its next token in the output)

    @classmethod
    def of(cls, runner: Any, drafts: list[int] | None = None) -> SeededRequests:
        """The seeded requests of the runner's batch. Seeds each one's generator for the bonus
        token, the one behind its `drafts`, which vLLM samples first."""
        batch = runner.input_batch
        seeds = {}
        for row in batch.generators:
            request = runner.requests[batch.req_ids[row]]
            seeds[row] = (request.sampling_params.seed, len(request.output_token_ids))
            behind = drafts[row] if drafts else 0
            batch.generators[row].manual_seed(mixed(*seeds[row], behind))
        return cls(runner.sampler.topk_topp_sampler, seeds)

    def sample(self, logits: torch.Tensor, drafts: list[int]) -> torch.Tensor:
        """Sample tokens `[sum of drafts]` from final logits `[sum of drafts, vocabulary]`, which
        have a row for each draft; `drafts` is their number by request."""
        streams, start = {}, 0
        for row, count in enumerate(drafts):
            if row in self.seeds:
                for offset in range(count):
                    stream = torch.Generator(device=logits.device)
                    streams[start + offset] = stream.manual_seed(mixed(*self.seeds[row], offset))
            start += count
        tokens: torch.Tensor = self.sampler(logits, streams, None, None)[0]
        return tokens


def mixed(seed: int, position: int, offset: int = 0) -> int:
    """Hash a seed and `position + offset` to 64 bits (SplitMix64, Steele et al. 2014). Neighbouring
    positions give unrelated numbers, also in the lower 32 bits, which are all that a generator on a
    CPU takes."""
    value = (seed * 0x9E3779B97F4A7C15 + (position + offset + 1) * 0xD1B54A32D192ED03) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def accept(
    draft_token_ids: torch.Tensor,  # [sum of drafts]
    num_draft_tokens: list[int],  # per request
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,  # [requests]
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,  # [sum of drafts, vocabulary], temperature, top-k, top-p applied
    bonus_token_ids: torch.Tensor,  # [requests, 1], behind the last draft
    sampling_metadata: Any,
    synthetic_mode: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Verify drafts: `[requests, max_spec_len + 1]` tokens, -1 behind a request's last one.

    Replaces vLLM's function of the same signature (v1/sample/rejection_sampler.py,
    rejection_sample), which still serves drafts with probabilities, and synthetic acceptance on
    CUDA.
    """
    if synthetic_mode and not target_logits.is_cuda:
        rates = options["synthetic_conditional_rates"]
        dice = synthetic.tokens(draft_token_ids, target_logits, num_draft_tokens, rates)
        return match(dice, draft_token_ids, bonus_token_ids, cu_num_draft_tokens, max_spec_len)
    noise: SeededRequests | None = getattr(sampling_metadata, "noise", None)
    if synthetic_mode or draft_probs is not None or noise is None:
        return _stock_rejection_sample(
            draft_token_ids,
            num_draft_tokens,
            max_spec_len,
            cu_num_draft_tokens,
            draft_probs,
            target_logits,
            bonus_token_ids,
            sampling_metadata,
            synthetic_mode=synthetic_mode,
            **options,
        )
    tokens = choose(target_logits, num_draft_tokens, sampling_metadata, noise)
    return match(tokens, draft_token_ids, bonus_token_ids, cu_num_draft_tokens, max_spec_len)


def choose(
    logits: torch.Tensor, drafts: list[int], sampling_metadata: Any, noise: SeededRequests
) -> torch.Tensor:
    """The target's token in place of each draft, `[sum of drafts]`: the most probable one for
    greedy requests, sampled for others."""
    if sampling_metadata.all_greedy:
        return argmax(logits)
    if sampling_metadata.all_random:
        return noise.sample(logits, drafts)
    likeliest = argmax(logits)  # before the sampler, which may write into the logits
    greedy = sampling_metadata.temperature == 0
    counts = torch.tensor(drafts, device=logits.device)
    greedy = greedy.repeat_interleave(counts, output_size=len(likeliest))
    return torch.where(greedy, likeliest, noise.sample(logits, drafts))


def match(
    tokens: torch.Tensor,  # [sum of drafts], the target's
    drafts: torch.Tensor,  # [sum of drafts]
    bonus: torch.Tensor,  # [requests, 1]
    ends: torch.Tensor,  # [requests], inclusive prefix sums of drafts per request
    longest: int,
) -> torch.Tensor:
    """Each request's tokens up to the first that differs from its draft, -1 behind that: int32
    `[requests, longest + 1]`. A request whose drafts all match gets its bonus token too."""
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).unsqueeze(1)
    columns = torch.arange(longest + 1, device=tokens.device)
    # Requests with fewer drafts read past their end, clamped to the last row; that is not used.
    flat = (ends.unsqueeze(1) - counts + columns).clamp(max=len(tokens) - 1).long()
    here = torch.where(columns < counts, tokens[flat], bonus)
    right = (columns < counts) & (tokens[flat] == drafts[flat])
    accepted = right.long().cumprod(1).sum(1, keepdim=True)
    return torch.where(columns <= accepted, here, -1).int()
