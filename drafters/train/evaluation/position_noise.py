"""Sampling at a temperature whose noise depends on the text and a token's place in it alone.

The counterpart, for replays, of what the engine does (drafters/vllm/verification): a token is the
argmax of logits / T plus Gumbel noise of its place, and a draft of the token has the same noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import LogitsProcessor

from drafters.model.head import DraftHead


@dataclass(frozen=True, slots=True)
class PositionNoise:
    """Gumbel noise for the answers of numbered prompts, the same in every call."""

    temperature: float  # above 0
    vocabulary: int  # of the target
    seed: int

    def at(self, prompt: int, place: int) -> torch.Tensor:
        """The noise of the answer's token `place`, from 0: float32 `[vocabulary]`."""
        bits = np.random.Philox(key=[self.seed, prompt << 32 | place])
        exponential = np.random.Generator(bits).standard_exponential(self.vocabulary, np.float32)
        smallest = np.finfo(np.float32).tiny
        return torch.from_numpy(-np.log(np.maximum(exponential, smallest)))


class NoisyLogits(LogitsProcessor):  # type: ignore[misc]
    """Makes greedy decoding sample: divides logits by the temperature and adds the noise."""

    def __init__(self, noise: PositionNoise, prompts: Sequence[int]) -> None:
        """`prompts` are the numbers of the batch's rows."""
        self._noise, self._prompts = noise, prompts
        self._place = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Logits `[rows, vocabulary]` of the next token of each row."""
        rows = torch.stack([self._noise.at(prompt, self._place) for prompt in self._prompts])
        self._place += 1
        return scores.float() / self._noise.temperature + rows.to(scores.device)


class NoisyDrafts:
    """Chooses drafts behind one prompt with the noise of the tokens that they predict."""

    def __init__(
        self, noise: PositionNoise, head: DraftHead, *, prompt: int, length: int, last: int
    ) -> None:
        """`length` is the prompt's, in tokens; drafts predict tokens up to place `last` of the
        text, both of them included."""
        device = head.output_matrix.device
        ids = head.to_target(torch.arange(len(head.output_matrix), device=device))
        rows = [noise.at(prompt, place - length) for place in range(length, last + 1)]
        self._gumbel = torch.stack(rows).to(device)[:, ids]  # [places, draft vocabulary]
        self._temperature, self._length = noise.temperature, length

    def __call__(self, logits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Draft ids `[..., n]` from logits `[..., n, draft vocabulary]` of tokens at the places
        `[..., n]` of the text."""
        gumbel = self._gumbel[places - self._length]
        return (logits.float() / self._temperature + gumbel).argmax(-1)
