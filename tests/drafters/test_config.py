"""The drafting settings that are passed to the engine's processes."""

from __future__ import annotations

import pytest

from drafters.config import DrafterConfig, captured_ks


def test_what_is_sent_is_what_is_read() -> None:
    sent = DrafterConfig(catch_up_tokens=99, bfloat16_on_cpu=False)
    assert DrafterConfig.read(sent.entry()) == sent


@pytest.mark.parametrize("nothing", [None, {}, {"other": 1}, {"aerie": {}}])
def test_without_an_entry_the_defaults_hold(nothing: dict[str, object] | None) -> None:
    assert DrafterConfig.read(nothing) == DrafterConfig()


@pytest.mark.parametrize(
    "entry",
    [
        {"k": 3},
        {"catch_up_tokens": 0},
        {"catch_up_tokens": 9, "catchup": 5},
        {"lookup_tokens": -1},
        {"head_tokens": -1},
    ],
)
def test_nonsense_is_refused(entry: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"unknown|must"):
        DrafterConfig.read({"aerie": entry})


def test_without_a_k_of_its_own_the_head_has_all_drafts() -> None:
    config = DrafterConfig(lookup_tokens=10)
    assert (config.head_k(7), config.lookup_k(7)) == (7, 7)


@pytest.mark.parametrize(
    ("k_max", "ks"),
    [
        (0, (0,)),
        (1, (0, 1)),
        (4, (0, 1, 2, 3, 4)),
        (7, (0, 1, 2, 3, 5, 7)),
        (11, (0, 1, 2, 3, 5, 7, 11)),
    ],
)
def test_captured_ks_rise_from_none_to_the_largest(k_max: int, ks: tuple[int, ...]) -> None:
    assert captured_ks(k_max) == ks
