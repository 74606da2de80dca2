"""The index of a text against a search through all of it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from drafters.lookup import text_index
from drafters.lookup.text_index import LONGEST, SHORTEST, TextIndex, TextMatch


def brute_force(text: Sequence[int]) -> TextMatch | None:
    """The newest of the longest matches, among all places."""
    best = TextMatch(SHORTEST - 1, 0)
    for place in range(len(text) - 1, 0, -1):
        common = 0
        while common < min(place, LONGEST) and text[place - 1 - common] == text[-1 - common]:
            common += 1
        if common > best.length:
            best = TextMatch(common, place)
    return best if best.length >= SHORTEST else None


def built(text: Sequence[int]) -> TextIndex:
    return TextIndex(np.array(text, np.int32))


@pytest.mark.parametrize("letters", [2, 5, 40])
def test_the_longest_match_is_the_one_that_a_search_finds(
    letters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for all places, whether the text came at once or in steps."""
    monkeypatch.setattr(text_index, "CANDIDATES", 10**6)
    rng = random.Random(letters)
    text = [rng.randrange(letters) for _ in range(400)]
    grown = built(text[:37])
    for end in range(38, len(text) + 1):
        grown.extend(text[end - 1 : end])
        expected = brute_force(text[:end])
        assert grown.longest_match() == expected
        if end % 20 == 0:
            assert built(text[:end]).longest_match() == expected


def test_of_many_places_the_newest_are_compared() -> None:
    rng = random.Random(1)
    text = [rng.randrange(3) for _ in range(3000)]
    index = built(text[:5])
    for end in range(6, len(text) + 1):
        index.extend(text[end - 1 : end])
        found, best = index.longest_match(), brute_force(text[:end])
        assert (found is None) == (best is None)
        if found is not None and best is not None:
            assert found.length <= best.length
            behind = text[:end][-found.length :]
            assert text[found.position - found.length : found.position] == behind


def test_places_with_the_same_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """All hashes are equal. The fault: another n-gram with the same hash is taken for a match."""
    monkeypatch.setattr(text_index, "CANDIDATES", 10**6)
    monkeypatch.setattr(text_index, "_FACTORS", (0, 0, 0))
    rng = random.Random(2)
    text = [rng.randrange(30) for _ in range(300)]
    grown = built(text[:3])
    for end in range(4, len(text)):
        grown.extend(text[end - 1 : end])
        assert grown.longest_match() == built(text[:end]).longest_match() == brute_force(text[:end])


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4])
def test_a_text_may_be_short(count: int) -> None:
    index = built([7] * count)
    expected = TextMatch(count - 1, count - 1) if count > 2 else None
    assert index.longest_match() == expected
    index.extend([1, 7, 7, 7])
    assert index.longest_match() == brute_force([7] * count + [1, 7, 7, 7])


def test_a_repetition_goes_on_beyond_the_end() -> None:
    index = built([5, 1, 2, 3, 1, 2, 3, 1, 2])
    match = index.longest_match()
    assert match == TextMatch(5, 6)
    assert index.following(match.position, 7) == [3, 1, 2, 3, 1, 2, 3]
    assert index.following(1, 3) == [1, 2, 3]


def test_tables_grow_with_the_text() -> None:
    rng = random.Random(3)
    text = [rng.randrange(50) for _ in range(5000)]
    index, at_once = built(text[:10]), built(text)
    small = index.nbytes
    index.extend(text[10:])
    assert len(index) == 5000 and [index[i] for i in (0, 4999)] == [text[0], text[4999]]
    assert index.longest_match() == at_once.longest_match() == brute_force(text)
    assert small < 10_000 < index.nbytes == at_once.nbytes <= 28 * 5000
    assert (index._newest == at_once._newest) and (index._previous == at_once._previous)
