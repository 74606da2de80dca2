"""The patches of vLLM: each test shows the fault that a patch corrects."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.transformers_utils.configs.speculators.algos import SUPPORTED_SPECULATORS_TYPES
from vllm.utils import cpu_resource_utils
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup as build

from drafters.config import captured_ks, captured_table
from drafters.vllm import patches
from drafters.vllm.v1.kv_cache import kept_whole


@pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's CPU build has the fault")
def test_values_are_expanded_replaced_and_keep_their_type() -> None:
    patches.apply()
    expand = rejection_sampler.expand_batch_to_tokens
    ends = torch.tensor([2, 5, 5, 6], dtype=torch.int32)  # the third request has no draft
    got = expand(torch.tensor([0.0, 1.5, 0.0, 0.7]), ends, 6, replace_from=0, replace_to=1)
    assert torch.equal(got, torch.tensor([1.0, 1.0, 1.5, 1.5, 1.5, 0.7]))
    assert got.dtype == torch.float32
    top_k = expand(torch.tensor([3, 7], dtype=torch.int32), ends[:2], 5)
    assert torch.equal(top_k, torch.tensor([3, 3, 7, 7, 7], dtype=torch.int32))
    assert expand(torch.empty(0), ends[:0], 0).shape == (0,)


@pytest.mark.skipif(not current_platform.is_cpu(), reason="a GPU compiles it for its memory")
def test_ranks_of_log_probabilities_are_counted_without_a_compiler() -> None:
    """Catches: streams that stall for seconds at the first request with log probabilities."""
    patches.apply()
    logprobs = torch.tensor([[-1.0, -3.0, -2.0], [-2.0, -2.0, -4.0]])
    with torch.compiler.set_stance("fail_on_recompile"):
        found = Sampler.gather_logprobs(logprobs, 1, torch.tensor([2, 1]))
    assert found.selected_token_ranks.tolist() == [2, 2]
    assert found.selected_token_ranks.dtype == torch.int64
    assert found.logprob_token_ids.tolist() == [[2, 0], [1, 0]]


@pytest.mark.parametrize("usable", [True, False])
def test_flashinfer_cannot_be_imported_where_its_kernels_cannot_be_compiled(
    usable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: vLLM's attention on Blackwell, its prefill of MLA and its all-reduce, which take
    FlashInfer wherever it is installed."""
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setattr("vllm.utils.flashinfer.has_flashinfer", lambda: usable)
    patches.hide_unusable_flashinfer()
    if usable:
        assert importlib.import_module("flashinfer") is not None
        return
    assert find_spec("flashinfer") is None
    with pytest.raises(ImportError):
        importlib.import_module("flashinfer.comm")


@pytest.mark.parametrize(
    ("size", "version", "supported"),
    [(128, 4, True), (256, 2, True), (512, 4, True), (512, 2, False), (512, None, False)],
)
def test_flash_attention_is_taken_for_heads_that_its_version_has(
    size: int, version: int | None, supported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: Gemma 4 on a B200 without FlashInfer, whose heads of 512 FlashAttention 2 lacks."""
    monkeypatch.setattr(
        "vllm.v1.attention.backends.fa_utils.get_flash_attn_version", lambda head_size: version
    )
    corrected = patches.with_version_of_head_size(lambda cls, head_size: True)
    assert corrected(None, size) is supported
    assert not patches.with_version_of_head_size(lambda cls, head_size: False)(None, size)


@pytest.mark.parametrize(("counted", "in_use"), [(7, 1), (5, 0), (None, None)])
def test_a_container_s_page_cache_is_not_in_use(
    counted: int | None, in_use: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patches, "inactive_page_cache", lambda: 6)
    assert patches.without_page_cache(lambda: counted)() == in_use


@pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's CPU worker asks for it")
def test_a_kv_cache_fits_beside_page_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a start that vLLM refuses in a container whose limit is full of weights' files."""
    patches.apply()
    gib = 2**30
    files = {"/sys/fs/cgroup/memory.max": gib, "/sys/fs/cgroup/memory.current": gib - 1}
    monkeypatch.setattr(cpu_resource_utils, "_read_int_file", files.get)
    cpu_resource_utils.get_cgroup_memory_limit.cache_clear()
    try:
        monkeypatch.setattr(patches, "inactive_page_cache", lambda: 0)
        assert cpu_resource_utils.get_memory_node_info().available_memory == 1
        monkeypatch.setattr(patches, "inactive_page_cache", lambda: gib // 2)
        assert cpu_resource_utils.get_memory_node_info().available_memory == gib // 2 + 1
    finally:
        cpu_resource_utils.get_cgroup_memory_limit.cache_clear()


def test_applying_twice_changes_nothing() -> None:
    def patched() -> tuple[Any, ...]:
        return (
            torch.compiler.load_compiled_function,
            kv_cache_utils.get_kv_cache_groups,
            SUPPORTED_SPECULATORS_TYPES["peagle"],
        )

    patches.apply()
    before = patched()
    patches.apply()
    assert patched() == before


def test_every_norm_of_the_librarys_p_eagle_heads_is_read() -> None:
    patches.apply()
    layers = {"model_type": "llama"}
    outside = {"mask_token_id": 3, "fc_norm": True, "norm_output": True}
    SUPPORTED_SPECULATORS_TYPES["peagle"](config_dict=outside, pre_trained_config=layers)
    assert layers["fc_norm"] is True and layers["norm_output"] is True  # dropped by vLLM


@pytest.fixture(scope="module")
def config() -> Any:
    """For the embedded models, with the cache's layout that the engine core settles on here."""
    from tests.drafters.vllm.scheduler_harness import configuration

    made = configuration()
    made.cache_config.kv_cache_layout = "LBNHC"
    return made


def _specs(*, full: int, sliding: int, head: int, head_dim: int = 64) -> dict[str, Any]:
    """KV cache specs of a target whose layers take turns, and of a head behind it."""
    sizes = {"block_size": 16, "num_kv_heads": 2, "dtype": torch.bfloat16}
    every = [*["full"] * full, *["sliding"] * sliding, *["head"] * head]
    made: dict[str, Any] = {}
    for index, kind in enumerate(every):
        name = f"model.layers.{index}.self_attn.attn"
        if kind == "sliding":
            made[name] = SlidingWindowSpec(**sizes, head_size=64, sliding_window=128)
        else:
            size = head_dim if kind == "head" else 64
            made[name] = FullAttentionSpec(**sizes, head_size=size)
    return made


@pytest.mark.parametrize(
    ("layers", "stock", "ours"),
    [
        # gpt-oss-20b with a head of four layers: within the rule of one and a half.
        ({"full": 12, "sliding": 12, "head": 2}, 1, [14, 12]),
        # Beyond it, vLLM halves the full layers and the head's with them.
        ({"full": 3, "sliding": 3, "head": 2}, 2, [3, 3, 2]),
        # As Gemma's: one full layer for five sliding ones, groups of one layer.
        ({"full": 1, "sliding": 5, "head": 2, "head_dim": 128}, 2, [1, 1, 1, 1, 1, 1, 2]),
        # Every layer alike: one group.
        ({"full": 6, "sliding": 0, "head": 2}, 1, [8]),
    ],
)
def test_the_head_s_layers_share_one_group(
    config: Any,
    layers: dict[str, int],
    stock: int,
    ours: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    patches.apply()
    of_target = layers["full"] + layers["sliding"]
    monkeypatch.setattr(config.model_config, "get_total_num_hidden_layers", lambda: of_target)
    specs = _specs(**layers)
    head = set(list(specs)[-layers["head"] :])

    def holding(groups: list[Any]) -> int:
        return sum(not head.isdisjoint(group.layer_names) for group in groups)

    patched = kv_cache_utils.get_kv_cache_groups
    assert holding(patched.__wrapped__(config, dict(specs))) == stock
    groups = patched(config, dict(specs))
    assert holding(groups) == 1
    assert sorted(len(group.layer_names) for group in groups) == sorted(ours)
    assert sorted(name for group in groups for name in group.layer_names) == sorted(specs)


def test_a_stage_without_the_head_keeps_its_groups(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM groups the layers of one pipeline stage to know what its graphs take. The fault: the
    last layers of each stage passed for the head's, and those of two kinds ended the start."""
    patches.apply()
    monkeypatch.setattr(config.model_config, "get_total_num_hidden_layers", lambda: 12)
    specs = _specs(full=3, sliding=3, head=0)
    names = list(specs)
    turns = {name: specs[name] for pair in zip(names[:3], names[3:], strict=True) for name in pair}
    patched = kv_cache_utils.get_kv_cache_groups
    assert patched(config, dict(turns)) == patched.__wrapped__(config, dict(turns))


def test_a_heads_sliding_layers_keep_all_tokens() -> None:
    """The fault: blocks behind the window are given away while the head has positions in them to
    enter, and layers of two kinds land in two groups."""
    specs = _specs(full=1, sliding=2, head=0)
    head = list(specs)[-1]
    kept = kept_whole(specs, {head}, block_size=16)
    full, target, ours = kept.values()
    assert full is specs[next(iter(specs))] and target in specs.values()
    assert type(ours) is FullAttentionSpec
    assert (ours.block_size, ours.sliding_window, ours.head_size) == (16, 128, 64)


@pytest.mark.parametrize(
    ("asked", "parallel", "method", "left"),
    [("1", True, "eagle3", 1), ("1", True, "draft_model", 2), ("", True, "eagle3", 2)],
)
def test_the_v2_runner_is_refused_only_for_what_it_lacks(
    asked: str, parallel: bool, method: str, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM names parallel drafting of any kind; of P-EAGLE's it has ours. Unless asked for V2, vLLM
    must find it lacking, or it would take V2 by itself."""
    if asked:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", asked)
    named = ["parallel drafting for EAGLE speculative decoding", "something else"]
    speculation = SimpleNamespace(parallel_drafting=parallel, use_eagle=lambda: method == "eagle3")
    config = SimpleNamespace(speculative_config=speculation)
    assert len(patches.with_parallel_drafting(lambda _: list(named))(config)) == left


def test_each_captured_k_gets_graphs_however_few_requests_there_may_be() -> None:
    table = captured_table(5)
    cut = build(table, vllm_max_batch_size=2, vllm_num_speculative_tokens=5)
    assert set(cut[1:]) == {0, 1}  # the fault
    mended = patches.with_captured_ks(build)
    for largest in (1, 2, 6, 64):
        found = mended(table, vllm_max_batch_size=largest, vllm_num_speculative_tokens=5)
        assert set(found[1:]) == set(captured_ks(5)) == {0, 1, 2, 3, 5}
    theirs = [(1, 4, 3), (5, 64, 1)]
    assert mended(theirs, vllm_max_batch_size=8, vllm_num_speculative_tokens=5) == build(
        theirs, vllm_max_batch_size=8, vllm_num_speculative_tokens=5
    )
