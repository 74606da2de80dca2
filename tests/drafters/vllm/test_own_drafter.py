"""Options beside which nothing here can draft are refused by name, before a drafter is built."""

from __future__ import annotations

import json
import sys
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from vllm import SamplingParams
from vllm.config import ModelConfig, VllmConfig, get_current_vllm_config
from vllm.exceptions import VLLMValidationError
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.engine.input_processor import InputProcessor

from drafters.config import LOOKUP_DRAFTER, DrafterConfig
from drafters.model.checkpoint import save_head
from drafters.model.config import HeadConfig
from drafters.model.head import DraftHead
from drafters.model.rope_scaling import RopeScaling
from drafters.train.embedded import EMBEDDED
from drafters.vllm import own_drafter
from drafters.vllm.own_drafter import (
    accept_undrafted,
    chooses_k,
    has_own_drafter,
    head_backend,
    limits_of,
    longest_text,
    looks_up,
    refuse,
)
from drafters.vllm.v1.parallel import ParallelDrafter
from drafters.vllm.v1.sequential import SequentialDrafter
from tests.drafters.vllm.scheduler_harness import LONGEST, configuration

V2 = "VLLM_USE_V2_MODEL_RUNNER"


@pytest.fixture(scope="module")
def p_eagle() -> VllmConfig:
    """A configuration for a P-EAGLE head, of K = 5."""
    return configuration()


@pytest.fixture(scope="module", params=["p-eagle", "eagle3"])
def config(request: pytest.FixtureRequest) -> VllmConfig:
    return configuration(head=request.param)


def changed(config: VllmConfig, **changes: Any) -> VllmConfig:
    """A configuration with other values, by dotted names with `__` for the dot."""
    config = copy(config)
    for name, value in changes.items():
        part, _, key = name.rpartition("__")
        owner = config
        if part:
            owner = copy(getattr(config, part))
            setattr(config, part, owner)
        setattr(owner, key, value)
    return config


@pytest.mark.parametrize("runner", ["", "0", "1"])
@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"kv_transfer_config": object()}, r"KV cache transfer .*kv_offloading_size"),
        ({"speculative_config__draft_sample_method": "probabilistic"}, "draft_sample_method"),
        ({"speculative_config__disable_padded_drafter_batch": True}, "disable_padded_drafter"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode context parallelism"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill context parallelism"),
    ],
)
def test_what_neither_runner_can_is_refused_on_both(
    p_eagle: VllmConfig, changes: dict[str, Any], name: str, runner: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Catches: a refusal of one runner that sends to the other, which fails without a word."""
    if runner:
        monkeypatch.setenv(V2, runner)
    refuse(p_eagle)
    with pytest.raises(NotImplementedError, match=name) as raised:
        refuse(changed(p_eagle, **changes))
    assert V2 not in str(raised.value)


def test_the_ranks_of_a_mixture_of_experts_draft_for_nobody(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: ranks meet in every pass, and each chooses its own number of passes. Ranks of a
    dense target never meet."""
    replicas = changed(config, parallel_config__data_parallel_size=2)
    refuse(replicas)
    monkeypatch.setattr(ModelConfig, "is_moe", True)
    refuse(config)
    with pytest.raises(NotImplementedError, match="data parallelism of a mixture of experts"):
        refuse(replicas)


@pytest.mark.parametrize("of", ["target", "head"])
def test_m_rope_is_refused(config: VllmConfig, of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = config.model_config if of == "target" else config.speculative_config.draft_model_config
    named = owner.model
    monkeypatch.setattr(ModelConfig, "uses_mrope", property(lambda self: self.model == named))
    with pytest.raises(NotImplementedError, match=r"M-RoPE: leave out --drafter"):
        refuse(config)
    both = changed(config, scheduler_config__async_scheduling=True)
    with pytest.raises(NotImplementedError, match=r"async_scheduling on [^,:]*, M-RoPE$"):
        refuse(both)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"scheduler_config__async_scheduling": True}, "async_scheduling on the V1"),
        ({"speculative_config__rejection_sample_method": "block"}, r"block .* on the V1"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallelism on the V1"),
    ],
)
def test_what_only_v2_can_is_refused_on_v1(
    config: VllmConfig, changes: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: the worker refuses it, in another process, when the model is being loaded, or it
    has no effect."""
    asked = changed(config, **changes)
    with pytest.raises(NotImplementedError, match=name):
        refuse(asked)
    monkeypatch.setenv(V2, "1")
    refuse(asked)


def test_every_drafter_refuses_before_it_is_built(config: VllmConfig) -> None:
    there = changed(config, parallel_config__decode_context_parallel_size=2)
    kind = ParallelDrafter if config.speculative_config.parallel_drafting else SequentialDrafter
    with pytest.raises(NotImplementedError, match="decode context parallelism"):
        kind(there, torch.device("cpu"), None, DrafterConfig())


def test_a_target_without_a_drafter_of_ours_is_not_asked(p_eagle: VllmConfig) -> None:
    refuse(changed(p_eagle, kv_transfer_config=object(), speculative_config=None))


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"eagle_aux_hidden_state_layer_ids": (0, 1, 2, 3, 4, 5)}, "more than 5 taps"),
        ({"eagle_aux_hidden_state_layer_ids": (0, 1, 2, 3, 4)}, None),
        ({"layer_types": ("sliding_attention",), "sliding_window": 8}, "sliding-window layers"),
        ({"layer_types": ("full_attention",)}, None),
        ({"max_position_embeddings": 32}, None),
        (
            {"rope_scaling": RopeScaling("yarn", 4.0, LONGEST // 8)},
            "texts beyond the positions of a head with YaRN",
        ),
        ({"rope_scaling": RopeScaling("yarn", 4.0, LONGEST // 4)}, None),
    ],
)
def test_heads_of_shapes_that_only_v1_runs_are_refused_on_v2(
    keys: dict[str, Any], name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: they loaded, and failed in the warm-up or drafted from freed blocks."""
    given = HeadConfig.load(EMBEDDED / "p-eagle")
    if "layer_types" in keys:
        keys = keys | {"layer_types": keys["layer_types"] * given.num_hidden_layers}
    save_head(DraftHead(replace(given, **keys)), tmp_path)
    config = configuration(head=str(tmp_path), parallel=True)
    refuse(config)
    monkeypatch.setenv(V2, "1")
    if name is None:
        refuse(config)
        return
    with pytest.raises(NotImplementedError, match=f"{name}.*set {V2}=0"):
        refuse(config)


def test_more_requests_than_a_kernel_tells_apart_are_refused_on_v2(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: the first step of 8,192 requests ended the engine."""
    many = changed(config, scheduler_config__max_num_seqs=8192)
    refuse(many)
    monkeypatch.setenv(V2, "1")
    refuse(changed(config, scheduler_config__max_num_seqs=8191))
    with pytest.raises(NotImplementedError, match=r"more than 8,191 requests .*max_num_seqs"):
        refuse(many)


@pytest.mark.parametrize(("positions", "longest"), [((), sys.maxsize), ((64, 32), 32)])
def test_a_head_reads_texts_as_long_as_its_shortest_table(
    positions: tuple[int, ...], longest: int
) -> None:
    layers = [torch.nn.Linear(2, 2) for _ in positions]
    for layer, count in zip(layers, positions, strict=True):
        layer.register_buffer("cos_sin_cache", torch.zeros(count, 2))
    assert longest_text(torch.nn.Sequential(*layers)) == longest


def test_taps_in_eagle_config_are_counted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_head(DraftHead(HeadConfig.load(EMBEDDED / "p-eagle")), tmp_path)
    file = tmp_path / "config.json"
    document = json.loads(file.read_text())
    del document["eagle_aux_hidden_state_layer_ids"], document["num_aux_hidden_states"]
    document["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2, 3, 4, 5]}
    file.write_text(json.dumps(document))
    config = configuration(head=str(tmp_path), parallel=True)
    monkeypatch.setenv(V2, "1")
    with pytest.raises(NotImplementedError, match="more than 5 taps"):
        refuse(config)


def test_a_context_that_v1_cuts_is_refused_on_v2(
    p_eagle: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = changed(p_eagle, additional_config=DrafterConfig(context_tokens=64).entry())
    refuse(cut)
    monkeypatch.setenv(V2, "1")
    with pytest.raises(NotImplementedError, match=f"draft_context.*set {V2}=0"):
        refuse(cut)


@pytest.mark.parametrize("options", [{"logit_bias": {3: 1.0}}, {"min_p": 0.2}])
def test_requests_that_are_not_drafted_for_are_taken_beside_our_drafter_only(
    config: VllmConfig, options: dict[str, Any]
) -> None:
    """The fault: vLLM refuses them beside any drafter."""
    plain = InputProcessor(config)
    params = SamplingParams(**options)
    with pytest.raises(VLLMValidationError, match="not yet supported"):
        plain._validate_params(params, ("generate",))
    accept_undrafted(plain)
    plain._validate_params(params, ("generate",))
    other = SimpleNamespace(parallel_drafting=False, method="mtp")
    theirs = SimpleNamespace(speculative_config=other)
    accept_undrafted(theirs)  # type: ignore[arg-type]
    assert theirs.speculative_config is other


class OnB200:
    """What `get_attn_backend` chooses where FlashInfer comes first, and parts decodes from prompts
    by their length; `missing` are backends that the device or the configuration rules out."""

    def __init__(self, *missing: str) -> None:
        self.missing = missing

    def __call__(self, *_: Any) -> Any:
        asked = get_current_vllm_config().attention_config.backend
        name = "FLASHINFER" if asked is None else asked.name
        if name in self.missing:
            raise ValueError(f"Selected backend {name} is not valid for this configuration")
        builder = SimpleNamespace(reorder_batch_threshold=1 if name == "FLASHINFER" else None)
        return SimpleNamespace(get_name=lambda: name, get_builder_cls=lambda: builder)


@pytest.fixture
def on_v2(p_eagle: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    monkeypatch.setenv(V2, "1")
    monkeypatch.setattr(own_drafter, "get_attn_backend", OnB200())
    return p_eagle


def test_a_backend_too_small_for_p_eagle_is_replaced_before_loading(
    on_v2: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: the head loaded, and the worker stopped when it was given its KV cache."""
    assert head_backend(on_v2) is AttentionBackendEnum.FLASH_ATTN
    (sentence,) = limits_of(on_v2)
    assert sentence == (
        "The draft head's attention runs on FLASH_ATTN: a pass of P-EAGLE has up to 10 tokens of a "
        "request, and FLASHINFER decodes at most 6 at once."
    )
    monkeypatch.setattr(own_drafter, "get_attn_backend", OnB200("FLASH_ATTN"))
    assert head_backend(on_v2) is AttentionBackendEnum.TRITON_ATTN
    asked = changed(on_v2, attention_config__backend=AttentionBackendEnum.FLASHINFER)
    assert head_backend(asked) is AttentionBackendEnum.TRITON_ATTN  # that is the target's


def test_no_backend_for_p_eagle_is_refused_before_loading(
    on_v2: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"speculative_config__attention_backend": AttentionBackendEnum.FLASHINFER}
    with pytest.raises(NotImplementedError, match=r"FLASHINFER decodes at most 6.*needs 10"):
        refuse(changed(on_v2, **own))
    monkeypatch.setattr(own_drafter, "get_attn_backend", OnB200("FLASH_ATTN", "TRITON_ATTN"))
    with pytest.raises(NotImplementedError, match="to FLASH_ATTN or TRITON_ATTN"):
        refuse(on_v2)
    monkeypatch.setenv(V2, "0")
    refuse(on_v2)
    assert limits_of(on_v2) == []


def test_vllms_backend_stays_where_it_will_do(on_v2: VllmConfig) -> None:
    triton = {"speculative_config__attention_backend": AttentionBackendEnum.TRITON_ATTN}
    assert head_backend(changed(on_v2, **triton)) is None
    assert head_backend(changed(on_v2, speculative_config__num_speculative_tokens=1)) is None
    sequential = changed(on_v2, speculative_config__parallel_drafting=False)
    assert head_backend(sequential) is None  # K + 1 tokens of a request
    assert head_backend(changed(on_v2, speculative_config=None)) is None


@pytest.mark.parametrize("name", ["FLASH_ATTN", "TRITON_ATTN"])
def test_the_other_backends_do_not_part_decodes_from_prompts(name: str) -> None:
    backend = AttentionBackendEnum[name].get_class()
    assert backend.get_builder_cls().reorder_batch_threshold is None


def drafting(config: VllmConfig, method: str, model: str) -> VllmConfig:
    """The configuration with drafts by another method than a head's."""
    return changed(
        config,
        speculative_config__method=method,
        speculative_config__model=model,
        speculative_config__parallel_drafting=False,
    )


LOOKUP = ("custom_class", LOOKUP_DRAFTER)


@pytest.mark.parametrize("method", [LOOKUP, ("ngram_gpu", "ngram_gpu")])
def test_lookups_are_drafts_of_this_project_without_a_head(
    p_eagle: VllmConfig, method: tuple[str, str]
) -> None:
    found = drafting(p_eagle, *method)
    speculation = found.speculative_config
    assert looks_up(speculation) and chooses_k(speculation) and not has_own_drafter(speculation)
    refuse(found)
    assert limits_of(found) == []


@pytest.mark.parametrize("method", [("ngram", "ngram"), ("custom_class", "their.Proposer")])
def test_other_drafters_of_vllm_are_not(p_eagle: VllmConfig, method: tuple[str, str]) -> None:
    assert not chooses_k(drafting(p_eagle, *method).speculative_config)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"scheduler_config__async_scheduling": True}, "async_scheduling"),
        ({"speculative_config__rejection_sample_method": "block"}, "rejection_sample_method"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallelism"),
    ],
)
def test_what_lookups_cannot_draft_beside_is_named(
    p_eagle: VllmConfig, changes: dict[str, Any], name: str
) -> None:
    with pytest.raises(NotImplementedError, match=name):
        refuse(changed(drafting(p_eagle, *LOOKUP), **changes))


@pytest.mark.parametrize("method", ["head", "lookup"])
def test_layers_that_are_captured_at_one_length_have_no_drafts_on_v2(
    p_eagle: VllmConfig, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: the start failed at the first capture, when the weights had been loaded."""
    found = drafting(p_eagle, *LOOKUP) if method == "lookup" else p_eagle
    monkeypatch.setattr(ModelConfig, "is_hybrid", True)
    refuse(found)
    monkeypatch.setenv(V2, "1")
    with pytest.raises(NotImplementedError, match="Mamba or short-convolution layers"):
        refuse(found)
    text = SimpleNamespace(linear_conv_kernel_dim=4)
    refuse(changed(found, model_config__hf_text_config=text))


@pytest.mark.parametrize(
    ("kind", "any_length"),
    [
        ("Qwen3NextConfig", True),
        ("Qwen3_5TextConfig", True),
        ("OlmoHybridConfig", True),
        ("GraniteMoeHybridConfig", False),
        ("NemotronHConfig", False),
        ("JambaConfig", False),
        ("FalconH1Config", False),
        ("Zamba2Config", False),
        ("Lfm2Config", False),
    ],
)
def test_gated_delta_nets_are_known_by_their_configuration(kind: str, any_length: bool) -> None:
    model = SimpleNamespace(
        is_hybrid=True, is_attention_free=False, hf_text_config=getattr(transformers, kind)()
    )
    assert own_drafter._is_captured_at_one_length(model) is not any_length  # type: ignore[arg-type]
