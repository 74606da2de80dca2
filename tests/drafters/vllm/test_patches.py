"""The patches of vLLM: each test shows the fault that a patch corrects."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from drafters.config import every_k
from drafters.vllm import patches
from drafters.vllm.v1.kv_cache import kept_whole

REPOSITORY = Path(__file__).resolve().parents[3]
TEMPERATURES = torch.tensor([0.0, 1.5, 0.0, 0.7])
ENDS = torch.tensor([2, 5, 5, 6], dtype=torch.int32)  # the third request has no draft
EXPANDED = torch.tensor([1.0, 1.0, 1.5, 1.5, 1.5, 0.7])


def test_values_are_expanded_replaced_and_keep_their_type() -> None:
    got = patches.expand_batch_to_tokens(TEMPERATURES, ENDS, 6, replace_from=0, replace_to=1)
    assert torch.equal(got, EXPANDED)
    assert got.dtype == torch.float32
    top_k = patches.expand_batch_to_tokens(torch.tensor([3, 7], dtype=torch.int32), ENDS[:2], 5)
    assert torch.equal(top_k, torch.tensor([3, 3, 7, 7, 7], dtype=torch.int32))


def test_an_empty_batch_expands_to_nothing() -> None:
    empty = patches.expand_batch_to_tokens(torch.empty(0), torch.empty(0, dtype=torch.int32), 0)
    assert empty.shape == (0,)


@pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's CPU build has the fault")
def test_the_sampler_uses_the_correction() -> None:
    """Fails if vLLM renames the function, which would bring the fault back unseen."""
    from vllm.v1.sample import rejection_sampler

    patches.apply()
    got = rejection_sampler.expand_batch_to_tokens(TEMPERATURES, ENDS, 6, 0, 1)
    assert torch.equal(got, EXPANDED)


def test_applying_twice_changes_nothing() -> None:
    patches.apply()
    load = torch.compiler.load_compiled_function
    patches.apply()
    assert torch.compiler.load_compiled_function is load


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches.vllm, "__version__", "0.33.0")
    with pytest.raises(RuntimeError, match=r"0\.33\.0"):
        patches.apply()


def _speculation(parallel: bool, method: str = "mtp") -> Any:
    """By default one of vLLM's own drafters, unless it is parallel."""
    return SimpleNamespace(parallel_drafting=parallel, method=method, use_eagle=lambda: True)


def test_logit_bias_and_min_p_keep_their_processors_beside_our_drafter() -> None:
    from vllm.v1.sample.logits_processor.builtin import (
        LogitBiasLogitsProcessor,
        MinPLogitsProcessor,
    )
    from vllm.v1.worker import gpu_model_runner

    patches.apply()

    def kinds(speculation: Any) -> set[type]:
        config = SimpleNamespace(
            speculative_config=speculation, scheduler_config=SimpleNamespace(max_num_seqs=4)
        )
        made = gpu_model_runner.build_logitsprocs(config, torch.device("cpu"), False, False)
        assert config.speculative_config is speculation  # the engine's own is not touched
        return {type(processor) for processor in made.all}

    wanted = {LogitBiasLogitsProcessor, MinPLogitsProcessor}
    assert wanted <= kinds(_speculation(parallel=True))
    assert wanted <= kinds(_speculation(parallel=False, method="eagle3"))
    assert wanted.isdisjoint(kinds(_speculation(parallel=False)))  # vLLM's other drafters
    assert wanted <= kinds(None)


@pytest.mark.parametrize("installed", [False, True])
def test_other_logits_processors_are_refused_beside_our_drafter(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: with the speculative configuration hidden vLLM's own refusal is gone, and they
    are skipped where drafts are verified."""
    from vllm.v1.worker import gpu_model_runner

    patches.apply()
    found = [SimpleNamespace(value="their:Processor")] if installed else []
    monkeypatch.setattr(patches, "entry_points", lambda group: found)
    custom = [] if installed else ["their:Processor"]
    for kind in ({"parallel": True}, {"parallel": False, "method": "eagle3"}):
        config = SimpleNamespace(speculative_config=_speculation(**kind))
        with pytest.raises(ValueError, match=r"their:Processor .* not applied to drafted"):
            gpu_model_runner.build_logitsprocs(config, torch.device("cpu"), False, False, custom)


@pytest.mark.parametrize(
    ("keys", "count"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4, 8]}, 4),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2], "num_aux_hidden_states": 3}, 3),
        ({}, None),
    ],
)
def test_taps_that_are_named_are_counted(keys: dict[str, Any], count: int | None) -> None:
    """The fault: a Llama head of other than three taps is built for three."""
    import pickle

    from transformers import LlamaConfig
    from vllm.config import SpeculativeConfig

    patches.apply()
    override = SpeculativeConfig.hf_config_override
    # It travels to other processes as a reference.
    assert pickle.loads(pickle.dumps(override)) is override
    config = override(LlamaConfig(architectures=["LlamaForCausalLMEagle3"], **keys))
    assert getattr(config, "num_aux_hidden_states", None) == count


def test_a_map_of_the_whole_vocabulary_is_left_out() -> None:
    """The fault: "There is no module or parameter named 'draft_id_to_target_id'"."""
    maps = torch.zeros(3, dtype=torch.long)
    weights = [("d2t", maps), ("fc.weight", torch.ones(1))]

    def load(self: Any, weights: Any) -> list[str]:
        return [name for name, _ in weights]

    mended = patches.without_idle_map(load)
    whole, part = (
        SimpleNamespace(draft_id_to_target_id=None),
        SimpleNamespace(draft_id_to_target_id=maps),
    )
    assert mended(whole, weights) == ["fc.weight"]
    assert mended(part, weights) == ["d2t", "fc.weight"]
    with pytest.raises(ValueError, match="maps to other tokens"):
        mended(whole, [("d2t", maps + 1)])


def test_every_norm_of_the_librarys_p_eagle_heads_is_read() -> None:
    from vllm.transformers_utils.configs.speculators.algos import SUPPORTED_SPECULATORS_TYPES

    patches.apply()
    layers = {"model_type": "llama"}
    outside = {"mask_token_id": 3, "fc_norm": True, "norm_output": True}
    SUPPORTED_SPECULATORS_TYPES["peagle"](config_dict=outside, pre_trained_config=layers)
    assert layers["fc_norm"] is True and layers["norm_output"] is True  # dropped by vLLM


@pytest.mark.parametrize("options", [{"logit_bias": {3: 1.0}}, {"min_p": 0.2}])
def test_requests_with_them_are_taken_beside_our_drafter_only(options: dict[str, Any]) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    patches.apply()
    params = SamplingParams(**options)
    params._validate_spec_decode(_speculation(parallel=True))
    params._validate_spec_decode(_speculation(parallel=False, method="eagle3"))
    with pytest.raises(VLLMValidationError, match="not yet supported"):
        params._validate_spec_decode(_speculation(parallel=False))


@pytest.fixture(scope="module")
def config() -> Any:
    """For the embedded models, with the cache's layout that the engine core settles on here."""
    from tests.drafters.vllm.scheduler_harness import configuration

    made = configuration()
    made.cache_config.kv_cache_layout = "LBNHC"
    return made


def _specs(*, full: int, sliding: int, head: int, head_dim: int = 64) -> dict[str, Any]:
    """KV cache specs of a target whose layers take turns, and of a head behind it."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

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
    config: Any, layers: dict[str, int], stock: int, ours: list[int]
) -> None:
    from vllm.v1.core import kv_cache_utils

    patches.apply()
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


def test_a_heads_sliding_layers_keep_all_tokens() -> None:
    """The fault: blocks behind the window are given away while the head has positions in them to
    enter, and layers of two kinds land in two groups."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

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


GPU_WORKER = """
from types import SimpleNamespace
from unittest.mock import patch
from vllm.config import vllm as configuration
from drafters.vllm import patches
patches.current_platform = SimpleNamespace(is_cpu=lambda: False)
patches.HAS_TRITON = configuration.HAS_TRITON = True
patches.apply()
from vllm.config import VllmConfig
from vllm.v1.worker.gpu_worker import Worker
from drafters.vllm.v1.runner import V1DraftingRunner
from drafters.vllm.v2.runner import V2DraftingRunner
plain = VllmConfig()
speculation = SimpleNamespace(method="eagle3", parallel_drafting=True, use_eagle=lambda: True)
p_eagle = VllmConfig()
p_eagle.speculative_config = speculation
for config in (plain, p_eagle):
    worker = SimpleNamespace(
        use_v2_model_runner=config.use_v2_model_runner, vllm_config=config, device=None
    )
    build = lambda self, *_: None
    with patch.object(V1DraftingRunner, "__init__", build), \
            patch.object(V2DraftingRunner, "__init__", build):
        made = Worker._make_model_runner(worker)
    names = [kind.__name__ for kind in (V1DraftingRunner, V2DraftingRunner)
             if isinstance(made, kind)]
    print("made", *names)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "plain", "p_eagle"), [(None, "V2", "V1"), ("0", "V1", "V1"), ("1", "V2", "V2")]
)
def test_whichever_runner_a_gpu_gets_counts_what_is_not_finite(
    variable: str | None, plain: str, p_eagle: str
) -> None:
    """The fault: without a head vLLM chooses V2 by itself, while V1 was patched, so that nobody saw
    NaN. Asks vLLM's own worker which class it builds."""
    pytest.importorskip("triton")
    environ = {name: v for name, v in os.environ.items() if name != "VLLM_USE_V2_MODEL_RUNNER"}
    if variable is not None:
        environ["VLLM_USE_V2_MODEL_RUNNER"] = variable
    done = subprocess.run(
        [sys.executable, "-c", GPU_WORKER], cwd=REPOSITORY, env=environ,
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    made = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("made")]
    assert made == [[f"{plain}DraftingRunner"], [f"{p_eagle}DraftingRunner"]]


def test_each_k_gets_graphs_however_few_requests_there_may_be() -> None:
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup as build

    table = every_k(5)
    cut = build(table, vllm_max_batch_size=2, vllm_num_speculative_tokens=5)
    assert set(cut[1:]) == {0, 1}  # the fault
    mended = patches.with_every_k(build)
    for largest in (1, 2, 6, 64):
        found = mended(table, vllm_max_batch_size=largest, vllm_num_speculative_tokens=5)
        assert set(found[1:]) == {0, 1, 2, 3, 4, 5}
    theirs = [(1, 4, 3), (5, 64, 1)]
    assert mended(theirs, vllm_max_batch_size=8, vllm_num_speculative_tokens=5) == build(
        theirs, vllm_max_batch_size=8, vllm_num_speculative_tokens=5
    )
