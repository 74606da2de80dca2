"""Architectures without weights: shapes of the models, and published rates of acceptance."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from app.doctor.pair import check_models
from app.settings import load
from bench.systems.commands import Shared, command
from bench.systems.method import Method
from bench.systems.model_free import ARCHITECTURES, named, rates, speculation, write


@pytest.mark.parametrize(
    ("name", "billions"),
    # As their cards say.
    [("qwen3-8b", 8.2), ("qwen3-coder-30b", 30.5), ("gpt-oss-20b", 20.9), ("gpt-oss-120b", 116.8)],
)
def test_model_free_architectures_are_as_large_as_the_models(
    name: str, billions: float, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(write(name, tmp_path)["target"])
    assert config.rope_parameters["rope_theta"] >= 150000.0
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model.num_parameters() == pytest.approx(billions * 1e9, rel=0.005)
    head = AutoConfig.from_pretrained(tmp_path / "p-eagle")
    assert head.rope_parameters["rope_theta"] == config.rope_parameters["rope_theta"]


def test_an_architecture_of_fewer_layers_is_its_beginning(tmp_path: Path) -> None:
    """For a check of a few minutes: only the number of layers differs, and taps are distinct."""
    for name in ("gpt-oss-20b", "toy-moe"):
        whole, part = named(name), named(f"{name}@6")
        differ = {key for key in whole.config if whole.config[key] != part.config[key]}
        assert differ <= {"num_hidden_layers", "layer_types"}
        assert (part.rates, part.eagle3) == (whole.rates, whole.eagle3)
    config = AutoConfig.from_pretrained(write("gpt-oss-20b@6", tmp_path)["target"])
    assert len(config.layer_types) == config.num_hidden_layers == 6
    for head in ("p-eagle", "eagle3"):
        document = json.loads((tmp_path / head / "config.json").read_text())
        assert document["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert Shared.of(3, {}, "", "gpt-oss-20b@6", tmp_path).model == "gpt-oss-20b@6"


@pytest.mark.parametrize("name", ["gpt-5", "gpt-5@9", "toy@5", "toy@", "toy@six", "toy@-6"])
def test_an_architecture_that_does_not_exist_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(name.split("@")[0])):
        named(name)


def test_gpt_oss_is_accepted_as_far_as_was_published() -> None:
    small, large = (ARCHITECTURES[f"gpt-oss-{size}"] for size in ("20b", "120b"))
    assert 1 + sum(rates(small, 3)) == pytest.approx(3.02, abs=0.001)
    assert 1 + sum(rates(small, 7)) == pytest.approx(3.94, abs=0.001)
    assert 1 + sum(rates(large, 5)) == pytest.approx(3.15, abs=0.001)
    with pytest.raises(ValueError, match="published"):  # of EAGLE-3, for the large one
        speculation(large, 3, "eagle3")


def test_model_free_engines_have_shapes_and_rates_and_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = Shared.of(9, {}, "", "qwen3-8b", tmp_path)
    assert shared.model == "qwen3-8b"
    target, head = (
        json.loads((tmp_path / part / "config.json").read_text()) for part in ("target", "p-eagle")
    )
    assert target["hidden_size"] == head["target_hidden_size"] == 4096
    tokenizer = Tokenizer.from_file(str(tmp_path / "target" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == target["vocab_size"]
    assert all(tokenizer.decode([index]) for index in (8192, 100_000, 151_935))
    line, _ = command(Method("adaptive"), shared, 1)
    (given,) = [part for part in line if part.startswith("--engine-args=")]
    arguments = json.loads(given.partition("=")[2])
    rates = arguments["speculative_config"]["synthetic_acceptance_rates"]
    assert arguments["load_format"] == "dummy"
    assert rates[:3] == [0.813, 0.590, 0.411]
    assert len(rates) == arguments["speculative_config"]["num_speculative_tokens"] == 9
    assert rates == sorted(rates, reverse=True)
    settings = load(shared.settings(Method("adaptive")), {})
    assert all(finding.status != "FAIL" for finding in check_models(settings)[0])
    monkeypatch.setattr("bench.systems.commands._on_cpu", lambda: True)
    with pytest.raises(ValueError, match="synthetic acceptance"):
        command(Method("vllm", 7), shared, 1)
    monkeypatch.setattr("bench.systems.commands._on_cpu", lambda: False)
    line, _ = command(Method("eagle3", 3), shared, 1)
    assert '"synthetic_acceptance_length": 2.65' in " ".join(line)
    with pytest.raises(ValueError, match="published"):
        command(Method("eagle3", 5), shared, 1)
    with pytest.raises(ValueError, match="no architecture"):
        Shared.of(7, {}, "", "gpt-2", tmp_path)
