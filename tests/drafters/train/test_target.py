"""The target's hidden states equal transformers' own, family by family."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from drafters.train import runtime
from drafters.train.target import FrozenTarget, TargetShape, checkpoint_folder
from tests.drafters.train.tiny import END, TURN_END, VOCABULARY, load_target, write_target

PLAIN = ["llama", "qwen3", "gpt2", "opt"]


def _tokens(rows: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kind", [*PLAIN, "granite", "cohere", "gemma2"])
def test_taps_and_logits_equal_transformers(tmp_path: Path, kind: str) -> None:
    target, tokens = load_target(tmp_path, kind), _tokens()
    states = target.states(tokens, [0, 1, 2])
    full = target.model(input_ids=tokens, output_hidden_states=True, use_cache=False)
    wanted = torch.cat(full.hidden_states[:3], dim=-1)
    torch.testing.assert_close(states.taps, wanted, rtol=0, atol=0)
    torch.testing.assert_close(target.logits(states.final), full.logits)
    assert states.final.shape == (2, 9, 16)
    linear = states.final @ target.lm_head.T
    if kind == "gemma2":
        assert not torch.allclose(linear, full.logits, atol=0.1)  # or the cap is not tested
        assert torch.equal(linear.argmax(-1), full.logits.argmax(-1))
        assert target.softcap == 2.0
    else:
        torch.testing.assert_close(linear, full.logits)


def test_the_last_tap_lies_before_the_final_norm(tmp_path: Path) -> None:
    target = load_target(tmp_path)
    states = target.states(_tokens(), [3])
    torch.testing.assert_close(target.model.model.norm(states.taps), states.final)
    assert not torch.allclose(states.taps, states.final)


def test_taps_come_in_the_order_asked_for(tmp_path: Path) -> None:
    target = load_target(tmp_path)
    one, two = (target.states(_tokens(), [tap]).taps for tap in (1, 2))
    assert torch.equal(target.states(_tokens(), [2, 1, 2]).taps, torch.cat([two, one, two], -1))
    assert target.states(_tokens(), []).taps.shape == (2, 9, 0)


@pytest.mark.parametrize("kind", PLAIN)
def test_padding_on_the_right_changes_nothing(tmp_path: Path, kind: str) -> None:
    target, tokens = load_target(tmp_path, kind), _tokens()
    padded = torch.cat([tokens, torch.zeros(2, 5, dtype=torch.int64)], dim=1)
    states, again = target.states(tokens, [0, 2, 3]), target.states(padded, [0, 2, 3])
    torch.testing.assert_close(again.taps[:, :9], states.taps)
    torch.testing.assert_close(again.final[:, :9], states.final)


def test_hooks_leave_nothing_behind_even_after_an_error(tmp_path: Path) -> None:
    target = load_target(tmp_path)
    target.states(_tokens(), [0, 3])
    with pytest.raises(IndexError):
        target.states(torch.tensor([[VOCABULARY]]), [0, 3])
    layers = target.model.model.layers
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in layers)


def test_states_can_be_inputs_of_a_graph(tmp_path: Path) -> None:
    """States of inference mode could not be saved for a backward pass."""
    states = load_target(tmp_path).states(_tokens(), [1])
    weight = torch.ones(16, 1, requires_grad=True)
    (states.taps @ weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("tap", [-1, 4])
def test_a_tap_outside_the_target_is_refused(tmp_path: Path, tap: int) -> None:
    with pytest.raises(ValueError, match=rf"taps \[{tap}\] are outside 0\.\.3"):
        load_target(tmp_path).states(_tokens(), [1, tap])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("phi", "without a bias"), ("hyperclovax", "logits of hyperclovax models are not")],
)
def test_a_family_with_other_logits_is_refused(tmp_path: Path, kind: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        load_target(tmp_path, kind)


def test_dtype_is_the_checkpoints_or_as_asked(tmp_path: Path) -> None:
    write_target(tmp_path, dtype=torch.bfloat16)
    target = FrozenTarget.load(tmp_path)
    assert target.dtype == torch.bfloat16
    states = target.states(_tokens(), [1, 3])
    assert states.taps.dtype == states.final.dtype == torch.bfloat16
    wide = FrozenTarget.load(str(tmp_path), dtype=torch.float32)
    assert (wide.dtype, wide.stored) == (torch.float32, torch.bfloat16)
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert not target.model.training


@pytest.mark.parametrize("half_is_slow", [False, True])
def test_nothing_is_trained_in_float16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half_is_slow: bool
) -> None:
    write_target(tmp_path, dtype=torch.float16)
    seconds = {torch.bfloat16: 2.0 if half_is_slow else 0.5, torch.float32: 1.0}
    monkeypatch.setattr(runtime, "seconds_of", lambda dtype, side: seconds[dtype])
    target = FrozenTarget.load_for_training(tmp_path)
    # A head is saved in the checkpoint's own type.
    assert (target.dtype, target.stored) == (
        torch.float32 if half_is_slow else torch.bfloat16,
        torch.float16,
    )
    wide = FrozenTarget.load_for_training(tmp_path, dtype=torch.float32)
    assert wide.dtype == torch.float32


def test_shapes_of_families_with_other_names(tmp_path: Path) -> None:
    assert load_target(tmp_path / "q", "qwen3").shape == TargetShape(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-6,
        rope_theta=5000.0, max_position_embeddings=128,
    )  # fmt: skip
    assert load_target(tmp_path / "g", "gpt2").shape == TargetShape(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, head_dim=4, rms_norm_eps=1e-5,
        rope_theta=10000.0, max_position_embeddings=128,
    )  # fmt: skip


def test_rope_of_mixed_attention_is_that_of_full_attention() -> None:
    config = SimpleNamespace(
        hidden_size=16, num_attention_heads=4, num_hidden_layers=2,
        rope_parameters={"sliding_attention": {"rope_theta": 1e4},
                         "full_attention": {"rope_theta": 1e6}},
    )  # fmt: skip
    assert TargetShape.of(config, 10).rope_theta == 1e6
    config.rope_parameters, config.rope_theta = None, 3e5
    assert TargetShape.of(config, 10).rope_theta == 3e5


def test_a_packaged_target_is_loaded_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load_target(tmp_path)
    folders = {"packaged:tiny": str(tmp_path)}
    monkeypatch.setattr("drafters.train.target.resolve", lambda name: folders.get(name, name))
    assert FrozenTarget.load("packaged:tiny").fingerprint == plain.fingerprint
    assert checkpoint_folder("packaged:tiny") == tmp_path


def test_end_tokens_are_the_tokenizers_and_the_generation_configs(tmp_path: Path) -> None:
    """The fault: those of the generation config alone, where a server ends at both."""
    folder = write_target(tmp_path)
    GenerationConfig(eos_token_id=[TURN_END, 7]).save_pretrained(folder)
    assert FrozenTarget.load(folder).end_tokens == [END, TURN_END, 7]
    GenerationConfig(eos_token_id=END).save_pretrained(folder)
    assert FrozenTarget.load(folder).end_tokens == [END]
    target = FrozenTarget.load(folder)
    target.model.generation_config = GenerationConfig()
    assert FrozenTarget(target.model, target.tokenizer, folder).end_tokens == [END]


def test_the_fingerprint_is_of_the_files(tmp_path: Path) -> None:
    first = load_target(tmp_path / "a").fingerprint
    assert load_target(tmp_path / "b").fingerprint == first  # the folder's name is no part of it
    assert load_target(tmp_path / "c", seed=2).fingerprint != first
    config = tmp_path / "b" / "config.json"
    config.write_text(config.read_text().replace("5000.0", "6000.0"))
    assert FrozenTarget.load(tmp_path / "b").fingerprint != first
