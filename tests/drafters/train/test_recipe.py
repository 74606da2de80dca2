"""The recipe of docs/train.md in short: another target, its prompts, its head, its acceptance.

Budgets are in tokens, so that a slow machine does the same work: 75 s on one quiet core.
"""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from app.cli import main as aerie
from drafters.model.checkpoint import load_head, save_head
from drafters.model.config import SelectorConfig
from drafters.train.data.examples import encode, read_examples
from drafters.train.embedded import EMBEDDED, pretrain, prompts
from drafters.train.embedded.tokenizer import MASK
from drafters.train.optimisation.head_init import HeadPlan, mask_token_of, new_head
from drafters.train.target import FrozenTarget
from tests.drafters import engine_job

pytestmark = [
    *engine_job.marks(),
    pytest.mark.timeout(900),  # for a machine that is many times slower or busy
]

K, ANSWER, HELD_OUT = 5, 48, 12  # drafts, tokens of an answer, prompts
HEADS = ("head", "untrained", "selector")  # the last: "head" with a random path selector
SCRIPT = Path(__file__).with_name("engine_acceptance.py")


@dataclass(frozen=True)
class Recipe:
    folder: Path  # target/, held-out.jsonl and the HEADS
    first_loss: list[float]  # per depth, of the first batch before any update


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("recipe")
    target, asked = str(folder / "target"), str(folder / "prompts.jsonl")
    tokenizer, files = ["--tokenizer", str(EMBEDDED / "target")], ["--files", "60"]
    assert not pretrain.main([
        *tokenizer, *files, "--out", target, "--family", "qwen3", "--layers", "4",
        "--hidden", "128", "--lengths", "256", "--batch-tokens", "2048", "--tokens", "120000",
        "--no-compile", "--threads", "1",
    ])  # fmt: skip
    assert not prompts.main([*tokenizer, *files, "--out", asked, "--code", "48", "--chat", "48"])
    half = str(HELD_OUT // 2)
    held_out = ["--out", str(folder / "held-out.jsonl"), "--held-out"]
    assert not prompts.main([*tokenizer, *held_out, "--code", half, "--chat", half])

    def train(out: Path, tokens: int) -> list[float]:
        assert not aerie([
            "train", "--target", target, "--prompts", asked, "--out", str(out),
            "--work", str(folder / "work"), "--layers", "2", "--mask-token", MASK,
            "--response-tokens", str(ANSWER), "--max-length", "512", "--batch-tokens", "1024",
            "--tokens", str(tokens), "--threads", "1", "--device", "cpu",
        ])  # fmt: skip
        return json.loads((out / "provenance.json").read_text())["loss_per_depth"]

    first_loss = train(folder / "one-update", 1)
    train(folder / "head", 30_000)
    frozen = FrozenTarget.load(target)
    plan = HeadPlan(layers=2, mask_token=mask_token_of(frozen, MASK))
    save_head(new_head(frozen, plan, torch.bfloat16), folder / "untrained")
    head = load_head(folder / "head")
    for parameter in head.add_selector(SelectorConfig(16)).parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    save_head(head, folder / "selector")
    return Recipe(folder, first_loss)


@pytest.fixture(scope="module")
def evaluated(recipe: Recipe) -> dict[str, float]:
    """Head -> acceptance length by `aerie evaluate`."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert not aerie([
            "evaluate", "--target", str(recipe.folder / "target"),
            "--head", *(str(recipe.folder / name) for name in HEADS),
            "--k", str(K), "--tokens", str(ANSWER),
            "--prompts", str(recipe.folder / "held-out.jsonl"), "--dtype", "float32",
            "--threads", "1", "--device", "cpu", "--json",
        ])  # fmt: skip
    documents = map(
        json.loads, filter(lambda line: line[:1] == "{", printed.getvalue().split("\n"))
    )
    return {
        name: document["workloads"]["held-out"][str(K)]["acceptance_length"]
        for name, document in zip(HEADS, documents, strict=True)
    }


@pytest.fixture(scope="module")
def served(recipe: Recipe) -> dict[str, float]:
    """Head -> acceptance length by vLLM's counters, on the same prompts."""
    folder = recipe.folder
    tokenizer = FrozenTarget.load(folder / "target").tokenizer
    examples = read_examples([folder / "held-out.jsonl"])
    job = {
        "target": str(folder / "target"),
        "heads": {name: str(folder / name) for name in ("head", "selector")},
        "prompts": [encode(example, tokenizer, max_tokens=400) for example in examples],
        "max_tokens": ANSWER,
        "k": K,
    }
    result = engine_job.run(SCRIPT, folder, job, timeout=600)
    assert all(counts["drafts"] > 0 for counts in result.values())
    return {name: 1 + sum(item["accepted"]) / item["drafts"] for name, item in result.items()}


def test_the_target_is_another_one(recipe: Recipe) -> None:
    config = json.loads((recipe.folder / "target" / "config.json").read_text())
    embedded = json.loads((EMBEDDED / "target" / "config.json").read_text())
    for key in ("model_type", "num_hidden_layers", "hidden_size"):
        assert config[key] != embedded[key]


def test_the_loss_falls_at_every_depth(recipe: Recipe) -> None:
    facts = json.loads((recipe.folder / "head" / "provenance.json").read_text())
    assert len(facts["loss_per_depth"]) == facts["k_train"] == len(recipe.first_loss)
    for first, last in zip(recipe.first_loss, facts["loss_per_depth"], strict=True):
        assert last < 0.75 * first


def test_evaluate_sees_what_training_gained(evaluated: dict[str, float]) -> None:
    assert evaluated["untrained"] < 1.2
    assert evaluated["head"] > evaluated["untrained"] + 0.5
    assert evaluated["selector"] != evaluated["head"]  # the walk takes another path


def test_so_does_vllm_and_the_two_agree(
    evaluated: dict[str, float], served: dict[str, float]
) -> None:
    assert served["head"] > evaluated["untrained"] + 0.5
    # Equal but for float ties: one of them may change the rest of one answer in HELD_OUT.
    for name, length in served.items():
        assert length == pytest.approx(evaluated[name], rel=0.05)
