"""How long each request's run is, by slot."""

from __future__ import annotations

import numpy as np

from drafters.vllm.runs import Runs


def row(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_a_run_goes_on_while_all_that_was_asked_for_is_accepted() -> None:
    runs = Runs(4)
    slots = row(2, 0)
    assert runs.verified(slots, row(0, 0), row(1, 1)).tolist() == [0, 0]
    runs.ask(slots, row(3, 3))
    assert runs.verified(slots, row(3, 3), row(4, 3)).tolist() == [4, 0]  # the second: a rejection
    runs.ask(slots, row(7, 3))
    assert runs.verified(slots, row(7, 3), row(8, 4)).tolist() == [12, 4]


def test_drafts_that_were_left_out_end_it() -> None:
    runs, slots = Runs(2), row(1)
    runs.ask(slots, row(3))
    assert runs.verified(slots, row(2), row(3)).tolist() == [0]


def test_a_slot_that_changes_hands_begins_anew() -> None:
    runs, slots = Runs(1), row(0)
    runs.ask(slots, row(3))
    assert runs.verified(slots, row(3), row(4)).tolist() == [4]
    assert runs.verified(slots, row(0), row(1)).tolist() == [0]  # nobody's drafts yet
