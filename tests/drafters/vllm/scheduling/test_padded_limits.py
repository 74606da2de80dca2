"""On V2 with CUDA graphs, a request with a limit of its own leaves its batch uniform: it has as
many drafts as others, and those beyond its limit are in no count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import CUDAGraphMode
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from bench.simulate.fixed import Fixed
from drafters.config import LOOKUP, MAX_K
from drafters.vllm.scheduling.scheduler import AsyncDraftingScheduler
from tests.drafters.vllm.scheduler_harness import K_MAX, configuration

LIMITS = {"free": None, "one": 1, "none": 0}


class Steps:
    """A scheduler on V2, with requests of LIMITS, whose workers accept what they are told to."""

    def __init__(
        self, graphs: CUDAGraphMode, monkeypatch: pytest.MonkeyPatch, head: str = "p-eagle"
    ) -> None:
        config = configuration(batched=64, head=head)
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        config.compilation_config.cudagraph_mode = graphs
        config.scheduler_config.async_scheduling = True
        config.cache_config.enable_prefix_caching = False
        size = config.cache_config.block_size
        spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config.cache_config.num_gpu_blocks = 90
        cache = KVCacheConfig(90, [], [KVCacheGroupSpec(["layer"], spec)])
        self.scheduler = AsyncDraftingScheduler(
            config, cache, StructuredOutputManager(config), size, log_stats=True
        )
        self.scheduler.k_policy = self.policy = Fixed(0, K_MAX)
        self.requests: dict[str, Request] = {}
        for name, limit in LIMITS.items():
            extra = None if limit is None else {MAX_K: limit}
            parameters = SamplingParams(max_tokens=40, ignore_eos=True, extra_args=extra)
            self.requests[name] = Request(name, [1, 2, 3], parameters, None)
            self.scheduler.add_request(self.requests[name])

    def step(self, k: int, **accepted: int) -> Any:
        """A step that drafts `k`, and whose requests accept so many of their drafts."""
        self.policy.k = k
        scheduled = self.scheduler.schedule()
        names = list(scheduled.num_scheduled_tokens)
        made = [[5] * (1 + accepted.get(name, 0)) for name in names]
        index = {name: row for row, name in enumerate(names)}
        output = ModelRunnerOutput(names, index, made)
        self.outputs = self.scheduler.update_from_output(scheduled, output)
        return scheduled

    @staticmethod
    def drafts(scheduled: Any) -> dict[str, int]:
        return {name: len(d) for name, d in scheduled.scheduled_spec_decode_tokens.items()}


@pytest.mark.parametrize("head", ["p-eagle", LOOKUP])
def test_a_batch_with_limits_is_uniform_where_graphs_are(
    head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: one request with a largest K put the whole batch out of the CUDA graphs."""
    steps = Steps(CUDAGraphMode.FULL_AND_PIECEWISE, monkeypatch, head)
    steps.step(3)
    scheduled = steps.step(3, free=2, one=1)
    assert steps.drafts(scheduled) == {"free": 3, "one": 3, "none": 3}
    assert set(scheduled.num_scheduled_tokens.values()) == {4}
    assert scheduled.num_invalid_spec_tokens == {"one": 2, "none": 3}

    stats = next(o.scheduler_stats for o in steps.outputs.values() if o.scheduler_stats)
    counts = stats.spec_decoding_stats
    assert counts.num_drafts == 2 and counts.num_draft_tokens == 4
    assert counts.num_accepted_tokens == 3
    own = {name: request.spec_decode_metrics for name, request in steps.requests.items()}
    assert {name: (sum(c.histogram), c.num_draft_tokens) for name, c in own.items() if c} == {
        "free": (1, 3),
        "one": (1, 1),
        "none": (0, 0),
    }
    learned: list[Any] = []
    monkeypatch.setattr(steps.policy, "observe", learned.append)
    steps.scheduler.recorder.tell(steps.policy)
    assert learned[-1].drafted[:3] == (2, 1, 1) and learned[-1].accepted[:3] == (2, 1, 0)
    load = learned[-1].load
    assert load.padded and load.requests_by_draft_limit == (2, 1, 1, 1, 1)


def test_k_is_no_larger_than_any_request_has_use_for(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(CUDAGraphMode.FULL, monkeypatch)
    assert steps.step(K_MAX).num_spec_tokens_to_schedule == K_MAX
    steps.scheduler.finish_requests("free", RequestStatus.FINISHED_ABORTED)
    assert steps.step(K_MAX).num_spec_tokens_to_schedule == 1
    assert steps.drafts(steps.step(K_MAX, one=1)) == {"one": 1, "none": 1}
    steps.scheduler.finish_requests("one", RequestStatus.FINISHED_ABORTED)
    assert steps.step(K_MAX).num_spec_tokens_to_schedule == 0
    assert steps.drafts(steps.step(K_MAX)) == {}


def test_without_graphs_drafts_beyond_a_limit_are_not_scheduled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(CUDAGraphMode.NONE, monkeypatch)
    steps.step(3)
    scheduled = steps.step(3)
    assert steps.drafts(scheduled) == {"free": 3, "one": 1}
    assert scheduled.num_invalid_spec_tokens is None
    assert scheduled.num_spec_tokens_to_schedule == 3
