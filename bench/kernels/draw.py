"""Implementations of drawing drafts at a temperature, from the head's logits to draft tokens."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from bench.kernels.clock import Arm

TEMPERATURE, TOP_K, TOP_P = 0.7, 20, 0.95  # as Qwen3 recommends


def draw(batch: int, k: int, words: int, dtype: torch.dtype, device: str) -> dict[str, Arm]:
    """Arms for `batch * k` rows of `words` logits: with top-k and top-p, without them (`plain`),
    and vLLM's filter and draw of the target's tokens (`vllm`)."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    from drafters.vllm.v2.draft_sampling import DeviceDraftSampling

    rows, slots = batch * k, torch.arange(batch, device=device)
    logits = torch.randn(rows, words).to(device, dtype)
    tokens = torch.zeros(rows, dtype=torch.int64, device=device)
    positions = torch.arange(batch, device=device)

    def sampling(top_k: int, top_p: float) -> DeviceDraftSampling:
        def entry(value: float, kind: torch.dtype) -> SimpleNamespace:
            values = torch.full((batch,), value, dtype=kind)
            return SimpleNamespace(np=values.numpy(), gpu=values.to(device))

        states = SimpleNamespace(
            max_num_reqs=batch, temperature=entry(TEMPERATURE, torch.float32),
            seeds=entry(7, torch.int64), top_k=entry(top_k, torch.int32),
            top_p=entry(top_p, torch.float32), min_p=entry(0.0, torch.float32),
        )  # fmt: skip
        made = DeviceDraftSampling(states, torch.device(device), use_fp64=False)
        made.refresh(np.arange(batch))
        return made

    filtered, plain = sampling(TOP_K, TOP_P), sampling(words, 1.0)
    top_k = torch.full((rows,), TOP_K, dtype=torch.int32, device=device)
    top_p = torch.full((rows,), TOP_P, device=device)
    requests = slots.repeat_interleave(k)
    places = positions.repeat_interleave(k) + torch.arange(k, device=device).repeat(batch)

    def stock() -> torch.Tensor:
        kept = apply_top_k_top_p(logits.float() / TEMPERATURE, top_k, top_p)
        return gumbel_sample(
            kept, requests, filtered.temperature, filtered.seeds, places,
            apply_temperature=False, is_drafting=False,
        )  # fmt: skip

    def served() -> torch.Tensor:  # drafters/vllm/v2/deferring.py
        filtered.draw(tokens, logits, None, slots, positions)
        return tokens

    def unfiltered() -> torch.Tensor:
        plain.draw(tokens, logits, None, slots, positions)
        return tokens

    read = rows * words * logits.element_size()
    # vLLM's logits in float32 are written three times: converted, divided by T, and filtered.
    # Each time, what comes next reads them.
    in_float32 = 2 * 3 * rows * words * 4
    return {
        "vllm": Arm(stock, read + in_float32, on_device=True),
        "served": Arm(served, read, on_device=True),
        "plain": Arm(unfiltered, read, on_device=True),
    }
