"""Sampled text on vLLM's V2 model runner is that without drafts, at any K and in any batch, and
more of its drafts are accepted than of the head's most probable ones. Kernels run in Triton's
interpreter, with the tiny random models of the same test of V1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from tests.drafters import engine_job
from tests.drafters.vllm.verification.test_samples import HEADS, PROMPT, save_models, tiny_target

pytestmark = engine_job.marks()

SCRIPT = Path(__file__).parents[1] / "engine_samples_v2.py"
K_MAX = 3
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 4, "min_p": 0.02},
]
WAYS = ("none", "changing", "drawn", "most probable")


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_target()


@pytest.fixture(scope="module")
def results(
    target: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Head -> what its engine sampled."""
    folder = tmp_path_factory.mktemp("sampled")
    job = save_models(target, folder)
    texts = {"prompts": [PROMPT[n:] for n in (0, 7, 15)], "tokens": 10, "options": OPTIONS}
    job |= {"k_max": K_MAX, "ways": WAYS, "texts": texts}
    return engine_job.run(SCRIPT, folder, job, timeout=1500)


@pytest.mark.parametrize("name", HEADS)
def test_a_seeded_text_is_that_without_drafts(name: str, results: dict[str, Any]) -> None:
    """Catches: verification whose outcome depends on the drafts, as vLLM's by ratio does. Greedy
    requests are in the same batches."""
    texts = results[name]["texts"]
    for way in WAYS[1:]:
        assert texts[way] == texts["none"], way
    assert len({tuple(text) for text in texts["none"]}) > len(OPTIONS)


@pytest.mark.parametrize("name", HEADS)
def test_more_drawn_drafts_are_accepted(name: str, results: dict[str, Any]) -> None:
    steps = results[name]["steps"]
    rates = {way: accepted / count for way, (count, accepted) in steps.items() if count}
    print(f"{name}: accepted of a step's drafts {rates}")
    assert steps["drawn"][0] > 40
    assert rates["drawn"] > 1.3 * rates["most probable"]
