"""Openings: the built-in mixes, files of a user's own, and the draw."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from drafters.train.prompts.openings import (
    DEFAULT_MIX,
    MIXES,
    Opening,
    draw_openings,
    read_openings,
)


def test_half_of_the_default_mix_is_plain_chat_and_half_about_code() -> None:
    mix = MIXES[DEFAULT_MIX]
    shares: Counter[str] = Counter()
    for opening in mix:
        shares["chat" if opening.kind == "chat" else "code"] += opening.share  # type: ignore[assignment]
    assert shares == pytest.approx({"chat": 0.5, "code": 0.5})
    assert mix[0] == Opening(share=0.5)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", '[[openings]]\ntext = "Why"\nshare = 2\n[[openings]]\nsystem = "S"\nkind = "k"'),
        ("a.jsonl", '{"text": "Why", "share": 2}\n\n{"system": "S", "kind": "k"}\n'),
    ],
)
def test_a_file_of_openings_is_toml_or_json_lines(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert read_openings(file) == (Opening("Why", share=2), Opening(system="S", kind="k"))


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.jsonl", "", "not one opening"),
        ("a.jsonl", '{"text": "a"}\n[1]', "line 2: an opening is an object"),
        ("a.jsonl", '{"txt": "a"}', "line 1: unknown key 'txt'"),
        ("a.jsonl", '{"text": 3}', "line 1: `text` must be a string, got 3"),
        ("a.jsonl", '{"kind": null}', "line 1: `kind` must be a string"),
        ("a.jsonl", '{"share": 0}', "line 1: `share` must be positive"),
        ("a.jsonl", '{"share": "1"}', "line 1: `share` must be a number"),
        ("a.jsonl", "{", "line 1: "),
        ("a.toml", 'text = "a"', r"\[\[openings\]\]"),
        ("a.toml", "[[openings]]\nshare = -1", "opening 1: `share` must be positive"),
    ],
)
def test_a_wrong_opening_is_named(tmp_path: Path, name: str, text: str, reason: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ValueError, match=f"{name}: .*{reason}"):
        read_openings(file)


def test_openings_are_drawn_by_share_and_a_longer_draw_begins_the_same() -> None:
    openings = [Opening("a", share=3), Opening("b", share=1)]
    drawn = draw_openings(openings, 4000, seed=5)
    assert draw_openings(openings, 100, seed=5) == drawn[:100]
    assert drawn.count(0) == pytest.approx(3000, abs=120)
    assert draw_openings(openings, 100, seed=6) != drawn[:100]
