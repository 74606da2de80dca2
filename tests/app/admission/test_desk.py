"""How many may be inside and how many may wait, by default and as the operator says."""

from __future__ import annotations

from app.admission.desk import Desk
from app.engine.load import Load
from app.settings import load as load_settings


def desk(**given: str) -> Desk:
    return Desk(load_settings(given, {}), Load(capacity=32))


def test_the_queue_is_as_long_as_the_engine_is_wide_and_an_eighth_of_that_in_an_overload() -> None:
    gate = desk().gate
    assert (gate.places(), gate.most_waiting(False), gate.most_waiting(True)) == (36, 36, 5)


def test_a_queue_that_the_operator_has_set_stays_as_it_is() -> None:
    gate = desk(max_running="4", max_waiting="7").gate
    assert (gate.places(), gate.most_waiting(False), gate.most_waiting(True)) == (4, 7, 7)
