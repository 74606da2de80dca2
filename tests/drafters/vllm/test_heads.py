"""The head classes that replace vLLM's: each test shows the fault that they correct."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.models import ModelRegistry, registry

from drafters.vllm import heads, patches
from drafters.vllm.v1.bf16_head import HalfLinearMethod, half_precision

KINDS = {
    "Eagle3LlamaForCausalLM": heads.Eagle3LlamaForCausalLM,
    "Eagle3Qwen3ForCausalLM": heads.Eagle3Qwen3ForCausalLM,
}


@pytest.mark.parametrize("name", KINDS)
def test_every_architecture_of_a_replaced_class_gets_ours(name: str) -> None:
    """The fault: an architecture that vLLM has added keeps vLLM's class, and its faults."""
    theirs = registry._SPECULATIVE_DECODING_MODELS
    asked = {architecture for architecture, (_, kind) in theirs.items() if kind == name}
    assert asked == {architecture for architecture, kind in patches.HEADS.items() if kind == name}
    patches.apply()
    for architecture in asked:
        assert ModelRegistry.models[architecture].load_model_cls() is KINDS[name]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A replaced class over a stand-in for vLLM's, with one linear layer."""
    ours = KINDS[request.param]

    def build(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        torch.nn.Module.__init__(self)
        self.layer = torch.nn.Linear(2, 2)
        self.layer.quant_method = UnquantizedLinearMethod()

    def load(self: Any, weights: Any) -> list[str]:
        self.loaded = dict(weights)
        return list(self.loaded)

    theirs = ours.__bases__[1]
    monkeypatch.setattr(theirs, "__init__", build)
    monkeypatch.setattr(theirs, "load_weights", load)
    return ours


def configured(**keys: Any) -> Any:
    """The configuration of a head with these keys, and what vLLM passes to build it."""
    model = SimpleNamespace(
        hf_config=SimpleNamespace(**keys), dtype=torch.float32, quantization=None
    )
    return SimpleNamespace(speculative_config=SimpleNamespace(draft_model_config=model))


@pytest.mark.parametrize(
    ("keys", "count"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 4, 8]}, 4),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2], "num_aux_hidden_states": 3}, 3),
        ({}, None),
    ],
)
def test_taps_that_are_named_are_counted(kind: Any, keys: dict[str, Any], count: int) -> None:
    """The fault: a Llama head of other than three taps is built for three."""
    config = configured(**keys)
    kind(vllm_config=config)
    found = config.speculative_config.draft_model_config.hf_config
    assert getattr(found, "num_aux_hidden_states", None) == count


def test_a_map_of_the_whole_vocabulary_is_left_out(kind: Any) -> None:
    """The fault: "There is no module or parameter named 'draft_id_to_target_id'"."""
    head, maps = kind(vllm_config=configured()), torch.zeros(3, dtype=torch.long)
    weights = [("d2t", maps), ("fc.weight", torch.ones(1))]
    head.draft_id_to_target_id = None
    assert head.load_weights(weights) == ["fc.weight"]
    with pytest.raises(ValueError, match="maps to other tokens"):
        head.load_weights([("d2t", maps + 1)])
    head.draft_id_to_target_id = torch.nn.Parameter(maps, requires_grad=False)
    assert head.load_weights(weights) == ["d2t", "fc.weight"]


def test_linear_layers_are_halved_only_where_asked(kind: Any) -> None:
    """The fault: a head of vLLM's own drafter, or on V2, multiplies in bfloat16 unmeasured."""
    plain = kind(vllm_config=configured())
    assert type(plain.layer.quant_method) is UnquantizedLinearMethod
    with half_precision():
        halved = kind(vllm_config=configured())
    assert type(halved.layer.quant_method) is HalfLinearMethod
    assert type(kind(vllm_config=configured()).layer.quant_method) is UnquantizedLinearMethod


@pytest.mark.parametrize(("quantization", "loaded"), [(None, torch.float32), ("fp8", None)])
def test_weights_stored_in_8_bits_are_widened(kind: Any, quantization: Any, loaded: Any) -> None:
    """The fault: six warnings at each start of the default model."""
    config = configured()
    config.speculative_config.draft_model_config.quantization = quantization
    head, stored = kind(vllm_config=config), torch.tensor([0.5, -448.0]).to(torch.float8_e4m3fn)
    head.draft_id_to_target_id = stored
    head.load_weights([("fc.weight", stored), ("norm.weight", torch.ones(1, dtype=torch.bfloat16))])
    assert head.loaded["fc.weight"].dtype == (loaded or stored.dtype)
    assert head.loaded["fc.weight"].float().tolist() == [0.5, -448.0]
    assert head.loaded["norm.weight"].dtype == torch.bfloat16
