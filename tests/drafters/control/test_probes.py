"""Which K is probed, and how long a probe is taken to last before it has run."""

from __future__ import annotations

import pytest

from drafters.control.controller import Controller
from drafters.control.cost_table import Cell
from drafters.control.objective import LATENCY, Objective
from drafters.control.policy import Load
from drafters.control.predictions import Predictions
from drafters.control.probes import k_to_probe, probe_loss_seconds, probe_seconds, steps_of_probe
from drafters.control.tuning import Tuning

K_MAX = 3
REQUESTS = 4
TUNING = Tuning()


def predicted(
    objective: Objective | None = None, *, drafts_s: float = 0.040, plain_steps: int = 0
) -> Predictions:
    """Predictions of four requests whose steps take 10 ms without drafts and `drafts_s` with any;
    K = 0 was seen in `plain_steps` steps of service."""
    controller = Controller(K_MAX)
    controller.load_calibration(
        Cell(REQUESTS, k, drafts_s if k else 0.010, 50) for k in range(K_MAX + 1)
    )
    controller.acceptance.observe(100, (100,) * K_MAX, (90, 80, 70))
    for _ in range(plain_steps):
        controller.costs.observe(REQUESTS, 0, 0.010)
    return controller._predictor.predict(Load(REQUESTS), objective or Objective(), 0)


def probed(
    predictions: Predictions, k: int, drafter: bool = True, others: bool = False
) -> int | None:
    return k_to_probe(
        predictions, k, TUNING, step_noise=TUNING.step_noise, drafter_may_draft=drafter,
        others_may_draft=others,
    )  # fmt: skip


def test_what_a_probe_takes_is_the_same_for_every_objective() -> None:
    """No K holds the time per token for certain, but some may. Catches: the reciprocal of a time
    per token divided by tokens per second of all requests, as if each step of a probe took a
    quarter of what it may."""
    tpots = [1.0 / each.value for each in predicted(Objective(LATENCY, tpot_s=1e-6)).by_k.values()]
    may_hold = predicted(Objective(LATENCY, tpot_s=0.9 * min(tpots)))
    assert max(each.value for each in may_hold.by_k.values()) == pytest.approx(1.0 / min(tpots))
    throughput = predicted()
    for k in range(K_MAX + 1):
        assert probe_seconds(may_hold, k) == probe_seconds(throughput, k)


def test_a_probe_takes_at_least_as_long_as_a_plain_step() -> None:
    """And no longer than is certain: the cost of drafts is known from the calibration alone."""
    dear, cheap = predicted().by_k, predicted(drafts_s=0.012)
    assert dear[3].times_as_good > 2.7
    assert probe_seconds(predicted(), 3) == pytest.approx(dear[3].seconds / dear[3].times_as_good)
    assert probe_seconds(cheap, 3) == cheap.by_k[0].seconds
    assert probe_seconds(cheap, 0) == cheap.by_k[0].seconds


def test_plain_steps_come_first_while_their_cost_is_uncertain() -> None:
    """The speed-up is measured against them. At K = 0 they run anyway, unless lookups draft."""
    uncertain, certain = predicted(), predicted(plain_steps=50)
    assert probed(uncertain, 3) == 0
    assert probed(uncertain, 0, others=True) == 0
    assert probed(uncertain, 0) is not None and probed(uncertain, 0) != 0
    assert probed(certain, 3) != 0


def test_only_a_k_that_may_be_better_is_probed() -> None:
    """With its drafter switched off none is, and none that limits make equal to the present one:
    nor K = 0 where no request may have a draft, as its steps run anyway and would never end it."""
    predictions = predicted(drafts_s=0.012, plain_steps=50)
    assert probed(predictions, 0) == 3
    assert probed(predictions, 0, drafter=False) is None
    hopeless = predicted(drafts_s=1.0, plain_steps=50)
    assert probed(hopeless, 0) is None
    limited = Load(REQUESTS, requests_by_draft_limit=(0,) * K_MAX)
    assert probed(Predictions(limited, 0, predictions.by_k), 0) is None
    uncertain = Predictions(limited, 0, predicted().by_k)
    assert probed(uncertain, 3) is None and probed(uncertain, 0, others=True) is None


def test_a_probe_waits_until_its_steps_are_steady() -> None:
    predictions = predicted()
    assert steps_of_probe(predictions, 3, TUNING) == TUNING.probe_steps + 1
    settling = TUNING.settling_s / predictions.by_k[0].seconds
    assert steps_of_probe(predictions, 0, TUNING) == pytest.approx(TUNING.probe_steps + settling)


def test_a_probe_is_expected_to_lose_what_it_makes_less_and_what_the_drafter_reads() -> None:
    """Catches: a gain on one step set off against another probe; catch-up left out."""
    predictions = predicted()
    rate = 4000.0
    lost = 3 * (probe_seconds(predictions, 3) - predictions.by_k[3].tokens / rate)
    assert lost > 0.0
    assert probe_loss_seconds(predictions, 3, rate, 0.0, TUNING) == pytest.approx(lost)
    with_catch_up = probe_loss_seconds(predictions, 3, rate, 1.0, TUNING)
    assert 0.3 < with_catch_up - lost < 0.4
    assert probe_loss_seconds(predictions, 3, 1.0, 0.0, TUNING) == 0.0
