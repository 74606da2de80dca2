"""Sizes are rounded up to few buckets, with little padding."""

from __future__ import annotations

from drafters.train.optimisation.buckets import bucket


def test_a_bucket_holds_its_size_and_is_its_own_bucket() -> None:
    for size in range(1, 5000):
        assert size <= bucket(size) == bucket(bucket(size))


def test_few_shapes_occur_and_little_is_padding() -> None:
    sizes = range(256, 4097)
    assert len({bucket(size) for size in sizes}) <= 18
    padding = [bucket(size) / size - 1 for size in sizes]
    assert max(padding) < 0.25
    assert sum(padding) / len(padding) < 0.1
