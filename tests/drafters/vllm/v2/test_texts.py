"""Text on vLLM's V2 model runner is that without drafts, for both kinds of head and for lookups
without one, whatever requests ask for and whatever happens to them.

Requests share four places and six blocks of the KV cache. Steps have 40 tokens, so that
prompts are read in chunks; K changes at each step, and stays 0 for up to nine. Kernels run in
Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drafters.config import MAX_DEFERRED_STEPS
from drafters.model.checkpoint import load_head, save_head
from drafters.model.config import SelectorConfig
from drafters.train.embedded import EMBEDDED
from tests.drafters import engine_job

pytestmark = engine_job.marks()

SCRIPT = Path(__file__).parents[1] / "engine_texts_v2.py"
K = 4
PLAIN = "none"
# Head, whether requests with fewer drafts have K of them all the same, as they have where there are
# CUDA graphs. The selector's is a P-EAGLE head.
ENGINES: dict[str, tuple[str | None, bool]] = {
    PLAIN: (None, False),
    "eagle3": ("eagle3", True),
    "selector": ("selector", False),
    "lookup": ("lookup", True),
}
DRAFTING = [name for name in ENGINES if name != PLAIN]
HEADS = ["eagle3", "selector"]


def with_random_selector(folder: Path) -> Path:
    """The embedded P-EAGLE head with a path selector that changes some of its drafts."""
    head = load_head(EMBEDDED / "p-eagle")
    torch.manual_seed(0)
    for parameter in head.add_selector(SelectorConfig(16)).parameters():
        torch.nn.init.normal_(parameter, std=0.25)
    save_head(head, folder)
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each engine generated, and what happened meanwhile."""
    engines: dict[str, dict[str, Any]] = {
        name: {"head": head, "padded": padded} for name, (head, padded) in ENGINES.items()
    }
    folder = tmp_path_factory.mktemp("texts")
    engines["selector"]["head"] = str(with_random_selector(folder / "selector"))
    result: dict[str, dict[str, Any]] = engine_job.run(
        SCRIPT, folder, {"engines": engines}, timeout=1500
    )
    return result


@pytest.mark.parametrize("name", DRAFTING)
def test_text_is_that_without_drafts(name: str, results: dict[str, dict[str, Any]]) -> None:
    """Chunked, preempted, penalised, biased and structured ones too. The fault that `logit_bias`
    and `min_p` would show: drafted rows without them."""
    texts, plain = dict(results[name]["texts"]), dict(results[PLAIN]["texts"])
    ended, there = texts.pop("aborted"), plain.pop("aborted")
    assert texts == plain
    length = min(len(ended), len(there))
    assert length > 4 and ended[:length] == there[:length]
    assert results[name]["left"] == 0.0, "blocks of the KV cache are still taken"


def test_the_requests_differ_in_what_they_ask_for(results: dict[str, dict[str, Any]]) -> None:
    texts = results[PLAIN]["texts"]
    alike = ("max_k 0", "max_k 1", "min_p")
    assert all(texts[name] == texts["plain"] for name in alike)
    assert texts["biased"] != texts["plain"] and texts["structured"] != texts["plain"]
    assert texts["penalised"] != texts["chunked"]
    assert texts["sampled"] != texts["plain"] and texts["nucleus"] != texts["chunked"]


@pytest.mark.parametrize("name", DRAFTING)
def test_what_the_engines_are_for_has_happened(
    name: str, results: dict[str, dict[str, Any]]
) -> None:
    result = results[name]
    assert set(result["ks"]) == set(range(K + 1))
    assert result["preempted"] > 0 and result["chunked"] > 0
    if name in HEADS:
        assert result["deferred"] > MAX_DEFERRED_STEPS and result["caught up"] > 2
    assert max(step["tokens"] for step in result["steps"]) > 2


@pytest.mark.parametrize("name", DRAFTING)
def test_no_more_is_accepted_than_a_request_allows(
    name: str, results: dict[str, dict[str, Any]]
) -> None:
    """And drafts are cut off only where no CUDA graph would need the batch to be uniform."""
    padded, steps = ENGINES[name][1], results[name]["steps"]
    for request, limit in (("max_k 0", 0), ("max_k 1", 1)):
        own = [step for step in steps if step["request"].startswith(request)]
        assert all(step["tokens"] <= limit + 1 for step in own)
        assert any(step["drafts"] > limit for step in own) == padded
    undrafted = ("biased", "min_p") if name in HEADS else ()  # their text does not repeat itself
    for request in undrafted:  # as many as others
        own = [step for step in steps if step["request"].startswith(request)]
        assert max(step["drafts"] for step in own) == K
        assert max(step["tokens"] for step in own) > 1


@pytest.mark.parametrize("name", HEADS)
def test_the_drafters_seconds_are_told(name: str, results: dict[str, dict[str, Any]]) -> None:
    seconds = results[name]["seconds"]
    assert all(target > 0.0 for target, _, _ in seconds)
    drafting = [draft for _, draft, k in seconds if k]
    deferring = [draft for _, draft, k in seconds if not k]
    assert drafting and min(drafting) > 0.0
    assert min(deferring) < 0.2 * max(drafting)  # keeping states is no pass
