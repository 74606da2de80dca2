"""Sampled text has the target's distribution, whatever is drafted and for which requests."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafters.model.checkpoint import save_head
from drafters.model.config import HeadConfig
from drafters.model.head import DraftHead
from tests.drafters import engine_job

pytestmark = engine_job.marks()

VOCABULARY = 8
TOKENS = 3
# It repeats itself, so that lookups find a match behind most texts.
PROMPT = [int(digit) for digit in "0152736412053716240351476025152"]
K_MAX = 4
HEADS = ("p-eagle", "eagle3")
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"count": 2_500, "options": {"temperature": 1.0}},
    "top-k": {"count": 1_500, "options": {"temperature": 0.8, "top_k": 4}},
    "top-p": {"count": 1_500, "options": {"temperature": 0.7, "top_p": 0.95}},
    "logit_bias": {"count": 1_500, "options": {"temperature": 1.0, "logit_bias": {2: 1.5, 6: -2}}},
    "min_p": {"count": 1_500, "options": {"temperature": 1.0, "min_p": 0.08}},
}


def tiny_target() -> LlamaForCausalLM:
    """A target whose probabilities are known by running it on every text."""
    torch.manual_seed(4)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
            num_attention_heads=2, num_key_value_heads=1, head_dim=32,
            max_position_embeddings=64, tie_word_embeddings=False,
        )
    ).eval()  # fmt: skip
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=1.3 * parameter.shape[-1] ** -0.5)
    return model


def save_models(target: LlamaForCausalLM, folder: Path) -> dict[str, Any]:
    """Save the target and random heads in `folder`; the entries of a job that name them."""
    target.save_pretrained(folder / "target")
    for name in HEADS:
        head = DraftHead(
            HeadConfig(
                vocab_size=VOCABULARY, hidden_size=64, target_hidden_size=64, intermediate_size=96,
                num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
                eagle_aux_hidden_state_layer_ids=(0, 1, 2), max_position_embeddings=64,
                ptd_token_id=0 if name == "p-eagle" else None,
            )
        )  # fmt: skip
        save_head(head, folder / name)
    heads = {name: str(folder / name) for name in HEADS}
    return {"target": str(folder / "target"), "heads": heads}


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_target()


@pytest.fixture(scope="module")
def samples(
    target: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Head -> what its engine sampled."""
    folder = tmp_path_factory.mktemp("samples")
    job = {
        **save_models(target, folder), "prompt": PROMPT, "tokens": TOKENS, "k_max": K_MAX,
        "kinds": KINDS,
    }  # fmt: skip
    return engine_job.run(Path(__file__).parents[1] / "engine_samples.py", folder, job, timeout=900)


@pytest.fixture(params=HEADS)
def sampled(request: pytest.FixtureRequest, samples: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return samples[request.param]


@torch.no_grad()
def expected(
    target: LlamaForCausalLM, options: dict[str, Any], tokens: int = TOKENS
) -> dict[str, float]:
    """Probability of each text of so many tokens."""
    texts = list(itertools.product(range(VOCABULARY), repeat=tokens))
    logits = target(torch.tensor([[*PROMPT, *text] for text in texts])).logits
    logits = logits[:, len(PROMPT) - 1 : -1] / options["temperature"]
    for token, bias in options.get("logit_bias", {}).items():
        logits[..., token] += bias
    if top_k := options.get("top_k"):
        worst = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < worst, -math.inf)
    probabilities = logits.softmax(-1)
    if top_p := options.get("top_p"):  # tokens until their sum reaches top_p
        ordered, ids = probabilities.sort(-1, descending=True)
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0)
        probabilities = torch.zeros_like(ordered).scatter_(-1, ids, ordered)
        probabilities /= probabilities.sum(-1, keepdim=True)
    if min_p := options.get("min_p"):
        floor = min_p * probabilities.amax(-1, keepdim=True)
        probabilities = probabilities.masked_fill(probabilities < floor, 0)
        probabilities /= probabilities.sum(-1, keepdim=True)
    chosen = probabilities.gather(-1, torch.tensor(texts)[..., None])[..., 0].prod(-1)
    return {",".join(map(str, text)): float(p) for text, p in zip(texts, chosen, strict=True)}


def deviation(counts: dict[str, int], probabilities: dict[str, float]) -> float:
    """Chi-square against the probabilities, as standard deviations of a normal (Wilson-Hilferty
    1931). Texts that are expected less than five times are taken together."""
    total = sum(counts.values())
    impossible = [text for text in counts if probabilities[text] == 0]
    assert not impossible
    cells, rest_seen, rest_expected = [], 0, 0.0
    for text, probability in probabilities.items():
        seen, wanted = counts.get(text, 0), probability * total
        if wanted < 5:
            rest_seen, rest_expected = rest_seen + seen, rest_expected + wanted
        else:
            cells.append((seen, wanted))
    if rest_expected >= 5:
        cells.append((rest_seen, rest_expected))
    freedom = len(cells) - 1
    assert freedom >= 15
    chi2 = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    scale = 2 / (9 * freedom)
    return ((chi2 / freedom) ** (1 / 3) - (1 - scale)) / math.sqrt(scale)


@pytest.mark.parametrize("k", ["changing", "lookups"])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_come_as_often_as_the_target_says(
    kind: str, k: str, target: LlamaForCausalLM, sampled: dict[str, Any]
) -> None:
    result = sampled[k]
    counts = result["counts"][kind]
    assert sum(counts.values()) == KINDS[kind]["count"]
    assert result["accepted"] > 500  # drafts took part
    assert (result["looked_up"] > 500) == (k == "lookups")
    z = deviation(counts, expected(target, KINDS[kind]["options"]))
    print(
        f"{kind}, {k} K: {z:+.2f} standard deviations, {result['accepted']} drafts accepted, "
        f"{result['looked_up']} of lookups"
    )
    assert z < 4


def test_the_comparison_would_notice(target: LlamaForCausalLM, sampled: dict[str, Any]) -> None:
    """Against a distribution that is off by a little, the same samples fail."""
    counts = sampled["changing"]["counts"]["plain"]
    assert deviation(counts, expected(target, {"temperature": 1.2})) > 4
