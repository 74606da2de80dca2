"""A bfloat16 copy of a float32 layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.platforms import current_platform

from drafters.vllm import cpu_matmul
from drafters.vllm.v1 import bf16_head

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="layers are prepared in vLLM's CPU build only"
)


@pytest.fixture
def layer() -> Any:
    torch.manual_seed(0)
    return torch.nn.Linear(64, 96, bias=False)


def test_a_twin_multiplies_alike_in_bfloat16_and_leaves_the_layer_alone(layer: Any) -> None:
    weight, before = layer.weight, layer.weight.detach().clone()
    twin = bf16_head.twin(layer)
    x = torch.randn(5, 64)
    y = twin.cpu_linear(x, twin.weight, None)
    assert y.dtype == torch.float32
    assert torch.allclose(y, x @ before.T, atol=0.05)
    assert not torch.equal(y, x @ before.T)  # it did round
    assert layer.weight is weight and torch.equal(weight, before)
    assert weight.dtype == torch.float32 and not hasattr(layer, "cpu_linear")


def test_a_layer_of_another_type_keeps_it(layer: Any) -> None:
    layer.to(torch.bfloat16)
    twin = bf16_head.twin(layer)
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    found = twin.cpu_linear(x, twin.weight, None)
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.float(), (x @ layer.weight.T).float(), atol=0.05)


def test_only_a_float32_matrix_is_worth_a_twin(layer: Any) -> None:
    assert bf16_head.is_wide(layer)
    assert not bf16_head.is_wide(torch.nn.LayerNorm(8))  # a vector
    assert not bf16_head.is_wide(torch.nn.ReLU())  # no weight, as a quantised layer
    assert not bf16_head.is_wide(layer.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("faster", "most"), [(0, 0), (3, 0), (4, 4), (10, 8), (32, 32), (1000, bf16_head.MANY)]
)
def test_it_pays_up_to_as_many_rows_as_a_trial_says(
    monkeypatch: pytest.MonkeyPatch, faster: int, most: int
) -> None:
    def fastest(layers: Any, x: torch.Tensor) -> tuple[float, bool]:
        return (1.0 if x.dtype == torch.float32 else 0.5 if len(x) <= faster else 2.0), True

    monkeypatch.setattr(cpu_matmul, "_fastest", fastest)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert bf16_head.pays_up_to.__wrapped__() == most


def test_a_processor_without_it_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_matmul, "_fastest", lambda *_: pytest.fail("tried"))
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    assert bf16_head.pays_up_to.__wrapped__() == 0


def test_the_trial_times_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert bf16_head.pays_up_to.__wrapped__() in (0, 4, 8, 16, 32, bf16_head.MANY)
