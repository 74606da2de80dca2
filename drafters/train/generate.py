"""Batched continuation of prompts by the target."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafters.model.llama import Llama


@torch.no_grad()
def generate(
    target: Llama,
    prompts: Sequence[Sequence[int]],
    steps: int,
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """`steps` tokens after each prompt, past any end token: [prompts, steps].

    Shorter prompts are padded on the left. Temperature 0 is greedy.
    """
    width = max(map(len, prompts))
    padding = torch.tensor([width - len(prompt) for prompt in prompts])
    tokens = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, padding[row] :] = torch.tensor(prompt)
    real = torch.arange(width + steps)[None] >= padding[:, None]  # [prompts, width + steps]
    # A padding row must see something, or its softmax is 0/0: itself.
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    allowed = (causal & real[:, None, :width]) | torch.eye(width, dtype=torch.bool)
    positions = (torch.arange(width) - padding[:, None]).clamp(min=0)
    cache = target.new_cache(len(prompts), width + steps)
    hidden, _ = target(tokens, positions, allowed, cache=cache)
    output = torch.empty(len(prompts), steps, dtype=torch.long)
    for step in range(steps):
        logits = target.logits(hidden[:, -1]).float()
        if temperature > 0.0:
            chances = (logits / temperature).softmax(-1)
            output[:, step] = torch.multinomial(chances, 1, generator=generator)[:, 0]
        else:
            output[:, step] = logits.argmax(-1)
        if step + 1 < steps:
            total = width + step + 1
            hidden, _ = target(
                output[:, step : step + 1],
                (total - 1 - padding)[:, None],
                real[:, None, :total],
                cache=cache,
            )
    return output
