"""Student's t against published quantiles, and the factors that widen intervals of few units."""

from __future__ import annotations

import pytest

from drafters.small_samples import half_width, student_t, widening

# Quantiles at 0.975, as every table of the distribution has them.
TABLE = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 7: 2.3646, 11: 2.2010, 30: 2.0423}


@pytest.mark.parametrize(("freedom", "quantile"), TABLE.items())
def test_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_t(0.975, freedom) == pytest.approx(quantile, rel=0.002)


def test_quantiles_at_another_confidence() -> None:
    assert student_t(0.95, 5) == pytest.approx(2.0150, rel=0.002)
    assert student_t(0.5, 1) == student_t(0.5, 2) == student_t(0.5, 9) == 0.0


@pytest.mark.parametrize(
    ("units", "factor"), [(3, 2.69), (4, 1.87), (6, 1.44), (8, 1.29), (12, 1.17), (164, 1.01)]
)
def test_the_fewer_units_the_wider(units: int, factor: float) -> None:
    assert widening(units) == pytest.approx(factor, abs=0.005)
    assert half_width(units) == pytest.approx(1.96 * factor, abs=0.01)


def test_one_unit_has_no_spread() -> None:
    with pytest.raises(ValueError, match="two units"):
        half_width(1)
