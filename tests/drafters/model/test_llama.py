"""The plain target against transformers' definition of the same checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafters.model.llama import load_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("target")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_logits_and_taps_equal_transformers(folder: Path) -> None:
    reference = LlamaForCausalLM.from_pretrained(folder)
    tokens = torch.randint(40, (2, 11), generator=torch.Generator().manual_seed(2))
    causal = torch.ones(1, 11, 11, dtype=torch.bool).tril()
    with torch.no_grad():
        hidden, taps = load_llama(folder)(
            tokens, torch.arange(11).expand(2, -1), causal, taps=(0, 1, 3)
        )
        wanted = reference(tokens, output_hidden_states=True)
    logits = load_llama(folder).logits(hidden)
    torch.testing.assert_close(logits, wanted.logits, atol=2e-5, rtol=1e-4)
    assert taps is not None
    # Tap i is transformers' hidden_states[i]: off by one, and a head learns from another layer.
    expected = torch.cat([wanted.hidden_states[index] for index in (0, 1, 3)], dim=-1)
    torch.testing.assert_close(taps, expected, atol=2e-5, rtol=1e-4)


def test_cache_equals_one_pass_after_a_cut(folder: Path) -> None:
    model = load_llama(folder)
    tokens = torch.randint(40, (1, 9), generator=torch.Generator().manual_seed(3))
    causal = torch.ones(1, 9, 9, dtype=torch.bool).tril()
    positions = torch.arange(9)[None]
    whole, _ = model(tokens, positions, causal)
    cache = model.new_cache(1, 9)
    model(tokens[:, :5], positions[:, :5], causal[:, :5, :5], cache=cache)
    model(tokens[:, :2], positions[:, 5:7], causal[:, 5:7, :7], cache=cache)  # rejected tokens
    cache.truncate(5)
    rest, _ = model(tokens[:, 5:], positions[:, 5:], causal[:, 5:], cache=cache)
    torch.testing.assert_close(rest, whole[:, 5:], atol=1e-5, rtol=1e-4)


def test_cache_refuses_overflow(folder: Path) -> None:
    model = load_llama(folder)
    cache = model.new_cache(1, 2)
    tokens, positions = torch.zeros(1, 3, dtype=torch.long), torch.arange(3)[None]
    with pytest.raises(ValueError, match="do not fit"):
        model(tokens, positions, torch.ones(1, 3, 3, dtype=torch.bool), cache=cache)
