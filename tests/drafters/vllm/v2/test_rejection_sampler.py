"""Drafts are drawn with the sampler's noise only where they are verified by position: else the text
would not have the target's law."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from drafters.vllm.v2.draft_sampling import DeviceDraftSampling
from drafters.vllm.v2.rejection_sampler import PositionRejectionSampler
from drafters.vllm.v2.request_limits import RequestLimits
from drafters.vllm.v2.runner import V2DraftingRunner

CPU = torch.device("cpu")
TAPS = {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}  # where older heads name them


class Loaded:
    """What vLLM's runner has when it has loaded the target."""

    def load_model(self) -> None:
        self.taps = get_eagle3_aux_layers_from_config(
            self.speculative_config  # type: ignore[attr-defined]
        )
        self.sampler = SimpleNamespace(
            sampling_states=SimpleNamespace(max_num_reqs=4), use_fp64_gumbel=False
        )
        self.rejection_sampler: Any = RejectionSampler(
            self.sampler,  # type: ignore[arg-type]
            self.speculative_config,  # type: ignore[attr-defined]
            CPU,
        )


class Runner(V2DraftingRunner, Loaded):
    def __init__(self, method: str, draft_logits: torch.Tensor | None) -> None:
        self.device = CPU
        self.speculative_config = SimpleNamespace(
            method="eagle3", parallel_drafting=False, num_speculative_tokens=3,
            enable_adaptive_verification=False, rejection_sample_method=method,
            synthetic_acceptance_rates=[0.5, 0.4, 0.3],
            draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(eagle_config=TAPS)),
        )  # fmt: skip
        self._limits = RequestLimits(4, 3, CPU)
        self.own_speculator: Any = SimpleNamespace(sampling=None, draft_logits=draft_logits)


def test_the_target_gives_the_layers_that_an_older_head_names() -> None:
    """The fault: V2 does not look into `eagle_config`, and the target gave its default layers."""
    runner = Runner("standard", None)
    runner.load_model()
    assert runner.taps == (1, 17, 32)


@pytest.mark.parametrize(
    ("method", "draft_logits", "by_position"),
    [
        ("standard", None, True),
        ("standard", torch.zeros(1), False),  # probabilistic drafts
        ("block", None, False),
        ("synthetic", None, False),
    ],
)
def test_drafts_are_drawn_where_they_are_verified_by_position(
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    draft_logits: torch.Tensor | None,
    by_position: bool,
) -> None:
    """Elsewhere vLLM verifies them."""
    runner = Runner(method, draft_logits)
    runner.load_model()
    sampler = runner.rejection_sampler
    assert isinstance(sampler, PositionRejectionSampler)
    assert isinstance(runner.own_speculator.sampling, DeviceDraftSampling) == by_position
    if not by_position:
        monkeypatch.setattr(RejectionSampler, "_verify", lambda *arguments: arguments[2:3])
        rest: list[Any] = [None] * 9
        assert sampler._verify(torch.zeros(1, 4), draft_logits, *rest) == (draft_logits,)
