"""The policy of a fixed K, and the values that it refuses."""

from __future__ import annotations

import pytest

from bench.simulate.fixed import Fixed
from drafters.control.objective import ObjectiveError
from drafters.control.policy import Load


def test_the_load_changes_nothing_and_setting_k_does() -> None:
    policy = Fixed(3, k_max=7)
    assert [policy.choose(Load(n)) for n in (1, 400)] == [3, 3]
    policy.k = 0
    assert policy.choose(Load(1)) == 0


@pytest.mark.parametrize("k", [-1, 8, 2.0, True, "3", None])
def test_a_k_outside_of_the_range_or_not_a_number_is_refused(k: int) -> None:
    with pytest.raises(ObjectiveError) as refused:
        Fixed(k, k_max=7)
    assert refused.value.field == "k"
    policy = Fixed(3, k_max=7)
    with pytest.raises(ObjectiveError):
        policy.k = k
    assert policy.k == 3
