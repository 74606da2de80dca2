"""The comparison of drafts: it passes those of the torch module and notices those of another text,
in either type, for either head."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.gpu_check.drafts import ERRORS, WIDER, Drafted, compare, judge, recorded
from bench.gpu_check.part_report import PartReport
from bench.gpu_check.random_models import ModelShape, Reference, write
from drafters.model.config import Method

SHAPE = ModelShape(64, 1, kv_heads=1, vocabulary=2048)
K = 4


def texts() -> list[list[int]]:
    random = Random(0)
    return [[random.randrange(5, 200) for _ in range(9 + n)] for n in range(12)]


def draft(reference: Reference, text: list[int]) -> list[int]:
    """Greedy drafts, one by one: EAGLE-3 goes on with those it has made."""
    drafts: list[int] = []
    while len(drafts) < K:
        drafts.append(int(reference.logits(text, [*drafts, 0])[len(drafts)].argmax()))
    return drafts


@pytest.mark.parametrize("dtype", WIDER)
@pytest.mark.parametrize("method", ["p-eagle", "eagle3"])
def test_wrong_drafts_are_noticed(method: Method, dtype: torch.dtype, tmp_path: Path) -> None:
    places = write(SHAPE, method, dtype, tmp_path)
    exact, plain = (Reference(places, each, "cpu") for each in (WIDER[dtype], dtype))
    drafted = [draft(plain, text) for text in texts()]
    right = [Drafted(text, drafts, False) for text, drafts in zip(texts(), drafted, strict=True)]
    found = compare(right, exact.logits, plain.logits)
    assert (found["drafts"], found["wrong"]) == (12 * K, 0)
    assert found["tolerance"] == ERRORS * found["error_of_plain_torch"] > 0
    # Of a text that lacks its newest token: what a stale state would draft.
    stale = [Drafted(step.text, draft(plain, step.text[:-1]), False) for step in right]
    found = compare(stale, exact.logits, plain.logits)
    assert found["wrong"] > found["drafts"] / 4
    # Of a mask that is off by one: the last drafts in the places of the first.
    shifted = [Drafted(step.text, [*step.drafts[1:], step.drafts[0]], False) for step in right]
    assert compare(shifted, exact.logits, plain.logits)["wrong"] > found["drafts"] / 4


def test_drafts_are_recorded_of_a_speculator_that_hands_arguments_on() -> None:
    """vLLM gives most arguments by their place; a subclass may name only those that it needs."""
    drafts = torch.tensor([[7, 8, 9], [1, 2, 3]])
    texts = SimpleNamespace(gpu=torch.arange(32).view(2, 16))
    requests = SimpleNamespace(
        total_len=SimpleNamespace(gpu=torch.tensor([5, 6])),
        all_token_ids=texts,
        max_model_len=16,
    )

    class Speculator:
        def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            return drafts

    speculator = Speculator()
    runner = SimpleNamespace(speculator=speculator, req_states=requests)
    batch = SimpleNamespace(idx_mapping_np=np.array([1, 0]), num_reqs=2)
    sampled = torch.tensor([1, 0])  # the second request is in prefill
    others = [None] * 4
    with recorded(runner) as steps:
        speculator.propose(
            batch, *others, sampled, torch.zeros(2), None, None, None, None,
            num_speculative_tokens=2,
        )  # fmt: skip
    assert steps == [Drafted(list(range(16, 22)), [7, 8], False)]


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        ({}, None),
        ({"wrong": 1}, "1 of 900 drafts are wrong"),
        ({"drafts": 9}, "no more than 9"),
        ({"admitted": 0.5}, "admits 50.0%"),
        ({"in_graphs": 0}, "in a CUDA graph"),
    ],
)
def test_what_makes_the_part_fail(
    change: dict[str, Any], failure: str | None, tmp_path: Path
) -> None:
    report = PartReport(tmp_path / "x.json", "x", "cuda")
    judge(report, {"wrong": 0, "drafts": 900, "admitted": 0.01, "in_graphs": 5, **change})
    failures = report.document["failures"]
    assert failures == [] if failure is None else failure in failures[0]
