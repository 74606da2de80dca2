"""Drafts of requests that are not greedy, drawn with the noise of the tokens that they predict.

The target's token at a position is the argmax of its logits / T plus Gumbel noise of that position
(seeded_sampling.py). The drafter adds the same noise to its own logits / T. Where both
distributions are alike, so are their argmaxes: for a first draft at T = 1 that holds .337 of the
time, against .274 for the head's most probable token and at most .370 for any draft
(coupling without communication, arXiv 2408.07978). Nothing has to be stored or sent for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from drafters.vllm.verification.seeded_sampling import SeededRequests

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class DraftSampling:
    """What the drafts of a step's requests are drawn with."""

    seeded: SeededRequests
    metadata: Any  # vLLM's SamplingMetadata of the step: temperature, top_k, top_p by row
    made: Ints  # [requests], tokens that each made in this step
    vocabulary: int  # of the target

    def draw(
        self,
        tokens: torch.Tensor,  # int64 [drafts], the head's most probable ones
        logits: torch.Tensor,  # [drafts, draft vocabulary]
        ids: torch.Tensor | None,  # [draft vocabulary], the target's ids, where they differ
        rows: Ints,  # [drafts], row in the batch of each draft's request
        offsets: Ints,  # [drafts], how many drafts of its request come before
    ) -> torch.Tensor:
        """`tokens` with those of requests that have a seed, given or made, drawn anew."""
        which = [i for i, row in enumerate(rows.tolist()) if row in self.seeded.places]
        if not which:
            return tokens
        index = torch.tensor(which, device=logits.device)
        chosen = torch.from_numpy(rows[which]).to(logits.device)
        drawn = logits[index].float() / self.metadata.temperature[chosen].unsqueeze(1)
        top_k, top_p = self.metadata.top_k, self.metadata.top_p
        drawn = apply_top_k_top_p(
            drawn,
            None if top_k is None else top_k[chosen].clamp(max=drawn.shape[1]),
            None if top_p is None else top_p[chosen],
        )
        if ids is not None:  # noise belongs to the target's ids
            every = drawn.new_full((len(which), self.vocabulary), -torch.inf)
            drawn = every.index_copy_(1, ids, drawn)
        behind = self.made[rows] + offsets
        generators = {
            place: self.seeded.generator(int(rows[i]), int(behind[i]), logits.device)
            for place, i in enumerate(which)
        }
        sampled = self.seeded.sampler(drawn, generators, None, None)[0]
        return tokens.index_copy(0, index, sampled.to(tokens.dtype))
