"""What a warm-up must have accepted: read from model cards, judged with chance in mind."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from app.llm.head_acceptance import (
    FLOOR,
    FirstDrafts,
    far_below,
    least_expected,
    stated_by,
    warning,
)
from app.settings import REPOSITORY

CARD = """
| other | table |
| ----- | ----- |
| 1     | 2     |

| workload | K | acceptance length | 1          | 2          |
| -------- | - | ----------------- | ---------- | ---------- |
| code     | 1 | 1.90 ± 0.01       | .900 ±.015 |            |
| code     | 4 | 2.62 ± 0.05       | .800 ±.018 | .744 ±.031 |
| chat     | 4 | 2.62 ± 0.05       | .700 ±.018 | .744 ±.031 |
"""


@pytest.mark.parametrize(("k", "ratio"), [(1, 0.9), (4, 0.7), (7, 0.7), (2, 0.9)])
def test_the_lowest_workload_of_the_nearest_k_counts(k: int, ratio: float) -> None:
    assert stated_by(CARD, k) == ratio


@pytest.mark.parametrize("card", ["", "# A head", "| acceptance length | 1 |\n| x | y |", "|||\n|"])
def test_a_card_without_the_table_states_nothing(card: str) -> None:
    assert stated_by(card, 3) is None


def test_heads_without_a_card_have_the_floor(tmp_path: Path) -> None:
    assert least_expected(str(tmp_path), 3) == FLOOR
    assert least_expected("org/head", 3) == FLOOR
    (tmp_path / "README.md").write_text(CARD)
    assert least_expected(str(tmp_path), 4) == 0.35


def test_cards_of_this_repository_are_understood() -> None:
    heads = sorted(REPOSITORY.glob("models/*/*/README.md"))
    heads = [card for card in heads if card.parent.name != "target"]
    assert heads
    for card in heads:
        stated = stated_by(card.read_text("utf-8"), 3)
        assert stated is not None and 0.3 < stated < 1, card


def test_a_head_that_is_right_by_chance_only_is_far_below() -> None:
    assert far_below(FirstDrafts(23, 0), FLOOR)
    assert far_below(FirstDrafts(60, 4), 0.35)


def test_few_steps_prove_nothing() -> None:
    assert not far_below(FirstDrafts(0, 0), FLOOR)
    assert not far_below(FirstDrafts(5, 0), FLOOR)


def test_heads_that_are_as_good_as_wanted_are_hardly_ever_accused() -> None:
    random, least, verified = Random(1), 0.35, 40
    accused = sum(
        far_below(
            FirstDrafts(verified, sum(random.random() < least for _ in range(verified))), least
        )
        for _ in range(2000)
    )
    assert accused <= 2000 * 0.01 * 1.5


def test_the_warning_names_head_and_target() -> None:
    text = warning(FirstDrafts(23, 0), 0.42, head="heads/mine", target="org/target")
    assert "heads/mine had 0 of 23 first drafts accepted" in text
    assert "at least 42%" in text and "org/target" in text
