"""Sampling with noise that depends on a request's seed and a token's position alone.

vLLM draws from a request's generator as often as a step has draft tokens, so that the text of a
seeded request depends on what was drafted and accepted. Here the token at a position is sampled
with noise made from the request's seed and that position, and a draft token is accepted if it is
that token. The text is then the one that is sampled without any drafts.

Draft tokens are drawn with the same noise (sampled_drafts.py), and so agree with the target's token
more often than the head's most probable one would (coupling without communication, arXiv
2408.07978).
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from vllm.v1.sample import rejection_sampler

from drafters.ops.argmax import argmax
from drafters.vllm.verification import synthetic

MASK = 2**64 - 1
_stock_rejection_sample = rejection_sampler.rejection_sample


@dataclass(frozen=True)
class SeededRequests:
    """The requests of a step whose tokens are sampled with noise of their position."""

    sampler: Any  # this platform's TopKTopPSampler of vLLM
    places: dict[int, tuple[int, int]]  # row -> (seed, position of its next token in the output)

    @classmethod
    def in_batch_of(cls, runner: Any, *, own_seeds: bool) -> SeededRequests:
        """Those in the batch of vLLM's model runner: requests with a seed and, with `own_seeds`,
        all others that are not greedy, whose seed is made from their id. Changes nothing."""
        batch = runner.input_batch
        places = {}
        for row, name in enumerate(batch.req_ids):
            if name not in batch.random_reqs:
                continue
            request = runner.requests[name]
            seed = request.sampling_params.seed
            if seed is None and own_seeds:
                seed = seed_of_id(name)
            if seed is not None:
                places[row] = seed, len(request.output_token_ids)
        return cls(runner.sampler.topk_topp_sampler, places)

    def generator(self, row: int, offset: int, device: torch.device) -> torch.Generator:
        """The noise of the token `offset` places behind the next one of the request at `row`."""
        return torch.Generator(device=device).manual_seed(seed_at(*self.places[row], offset))

    def bonus_generators(
        self, num_draft_tokens: list[int] | None, device: torch.device
    ) -> dict[int, torch.Generator]:
        """Generators by row, as vLLM's SamplingMetadata has them, for the bonus token. It lies
        behind the row's draft tokens: none where `num_draft_tokens` is None."""
        generators = {}
        for row in self.places:
            offset = num_draft_tokens[row] if num_draft_tokens is not None else 0
            generators[row] = self.generator(row, offset, device)
        return generators

    def sample(self, logits: torch.Tensor, num_draft_tokens: list[int]) -> torch.Tensor:
        """Sample the target's token in place of each draft token: `[draft tokens]`.

        `logits` are final, `[draft tokens, vocabulary]`, request by request; `num_draft_tokens` is
        how many rows each request has.
        """
        generators = {}
        start = 0
        for row, count in enumerate(num_draft_tokens):
            if row in self.places:
                for offset in range(count):
                    generators[start + offset] = self.generator(row, offset, logits.device)
            start += count
        tokens: torch.Tensor = self.sampler(logits, generators, None, None)[0]
        return tokens


def seed_of_id(request_id: str) -> int:
    """The seed of a request that has none. vLLM's request ids end in random characters, and are the
    same on all ranks, which must draw the same tokens."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest())


def seed_at(seed: int, position: int, offset: int = 0) -> int:
    """The 64-bit seed of a request's generator at `position + offset` of its output, by SplitMix64
    (Steele et al. 2014). Neighbouring positions give unrelated numbers, also in the lower 32 bits,
    which are all that a generator on a CPU takes."""
    value = (seed * 0x9E3779B97F4A7C15 + (position + offset + 1) * 0xD1B54A32D192ED03) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def accept(
    draft_token_ids: torch.Tensor,  # [draft tokens], request by request
    num_draft_tokens: list[int],  # per request
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,  # [requests]
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,  # [draft tokens, vocabulary], temperature, top-k, top-p applied
    bonus_token_ids: torch.Tensor,  # [requests, 1], behind the last draft token
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
        tokens = synthetic.target_tokens(draft_token_ids, target_logits, num_draft_tokens, rates)
        return match(tokens, draft_token_ids, bonus_token_ids, cu_num_draft_tokens, max_spec_len)
    seeded: SeededRequests | None = getattr(sampling_metadata, "seeded_requests", None)
    if synthetic_mode or draft_probs is not None or seeded is None:
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
    tokens = target_tokens(target_logits, num_draft_tokens, sampling_metadata, seeded)
    return match(tokens, draft_token_ids, bonus_token_ids, cu_num_draft_tokens, max_spec_len)


def target_tokens(
    logits: torch.Tensor,  # [draft tokens, vocabulary]
    num_draft_tokens: list[int],  # per request
    sampling_metadata: Any,
    seeded: SeededRequests,
) -> torch.Tensor:
    """The target's own token in place of each draft token, `[draft tokens]`: the most probable one
    for greedy requests, sampled for others. The sampler may write into `logits`."""
    if sampling_metadata.all_greedy:
        return argmax(logits)
    if sampling_metadata.all_random:
        return seeded.sample(logits, num_draft_tokens)
    likeliest = argmax(logits)  # before the sampler, which may write into the logits
    greedy = sampling_metadata.temperature == 0
    counts = torch.tensor(num_draft_tokens, device=logits.device)
    greedy = greedy.repeat_interleave(counts, output_size=len(likeliest))
    return torch.where(greedy, likeliest, seeded.sample(logits, num_draft_tokens))


def match(
    tokens: torch.Tensor,  # [draft tokens], the target's
    draft_token_ids: torch.Tensor,  # [draft tokens]
    bonus_token_ids: torch.Tensor,  # [requests, 1]
    cu_num_draft_tokens: torch.Tensor,  # [requests], inclusive prefix sums of draft tokens
    max_spec_len: int,
) -> torch.Tensor:
    """Each request's tokens up to the first that differs from its draft token, -1 behind that:
    int32 `[requests, max_spec_len + 1]`. A request whose draft tokens all match gets its bonus
    token too."""
    ends = cu_num_draft_tokens
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).unsqueeze(1)
    columns = torch.arange(max_spec_len + 1, device=tokens.device)
    # A request with fewer draft tokens reads past its end, clamped to the last row; that is unused.
    flat = (ends.unsqueeze(1) - counts + columns).clamp(max=len(tokens) - 1).long()
    own = torch.where(columns < counts, tokens[flat], bonus_token_ids)
    right = (columns < counts) & (tokens[flat] == draft_token_ids[flat])
    accepted = right.long().cumprod(1).sum(1, keepdim=True)
    return torch.where(columns <= accepted, own, -1).int()
