"""A NaN among the weights of the target ends the request that meets it with an error, and a head of
which nothing is accepted is told.

The gateway here is of its own, with copies of the embedded models.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.settings import REPOSITORY

from .bodies import greedy
from .gateway import Gateway
from .wire import JSON, assert_error, metric

EMBEDDED = REPOSITORY / "models" / "embedded"
UNKNOWN = 8000  # a token that the warm-up does not meet; its embedding is NaN
START_S = 240.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * START_S)]


def damaged(source: str, folder: Path, tensor: str, row: int | slice, value: float) -> Path:
    """A copy of an embedded model with one row of a tensor replaced. Its embedding is untied."""
    shutil.copytree(EMBEDDED / source, folder)
    weights = load_file(folder / "model.safetensors")
    if source == "target":
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    weights[tensor][row] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def damaged_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A head that drafts nothing of use, and a target whose damage one token brings to light."""
    folder = tmp_path_factory.mktemp("damaged")
    target = damaged("target", folder / "target", "model.embed_tokens.weight", UNKNOWN, torch.nan)
    head = damaged("p-eagle", folder / "head", "norm.weight", slice(None), 0.0)
    arguments = ["--model", str(target), "--drafter", str(head), "--enforce-eager"]
    with Gateway.launch(folder / "gateway.log", arguments).serving(START_S) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def http(damaged_gateway: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=damaged_gateway.url, timeout=60, trust_env=False) as client:
        yield client


def test_a_head_of_which_nothing_is_accepted_is_told(
    damaged_gateway: Gateway, http: httpx.Client
) -> None:
    lines = damaged_gateway.text().splitlines()
    warnings = [line for line in lines if "first drafts accepted" in line]
    assert len(warnings) == 1, damaged_gateway.tail()
    assert "/head had 0 of " in warnings[0]
    assert metric(http, "aerie_warm_up_acceptance_low") == 1
    assert metric(http, "aerie_warm_up_acceptance_ratio") == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": [5, UNKNOWN, 7]},
        {"prompt": [5, UNKNOWN, 7], "logprobs": 2},
        {"prompt": [5, UNKNOWN, 7], "stream": True},
        {"prompt": [5, UNKNOWN, 7], "temperature": 1, "n": 2},
        {"logit_bias": {str(UNKNOWN): 100}},
    ],
)
def test_a_request_that_meets_it_ends_with_an_error(http: httpx.Client, changes: JSON) -> None:
    before = metric(http, "aerie_requests_non_finite_total")
    response = http.post("/v1/completions", json=greedy(**changes))
    assert_error(response, 500, code="non_finite_output")
    assert metric(http, "aerie_requests_non_finite_total") > before
