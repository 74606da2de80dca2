"""Confidence intervals have their stated coverage, on data whose true values are known."""

from __future__ import annotations

import pytest
import torch

from drafters.train.evaluation.statistics import draw_weights, ratio_intervals

TRUTH = 0.55


def synthetic(requests: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hits and steps of requests that differ in length and in how easy they are."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(10, 90, (requests,), generator=generator)
    easy = 0.3 + 0.5 * torch.rand(requests, generator=generator)  # its mean is TRUTH
    hits = torch.binomial(steps.float(), easy, generator=generator)
    return hits[:, None], steps


@pytest.mark.parametrize("requests", [6, 48])
def test_intervals_cover_the_truth_as_often_as_promised(requests: int) -> None:
    weights = draw_weights(requests, seed=1, resamples=1000)
    trials, covered, widths, naive = 400, 0, 0.0, 0
    for trial in range(trials):
        hits, steps = synthetic(requests, trial)
        low, high = ratio_intervals(hits, steps, weights)[0].tolist()
        covered += low <= TRUTH <= high
        widths += (high - low) / trials
        share = float(hits.sum() / steps.sum())
        naive += abs(share - TRUTH) <= 1.96 * (share * (1 - share) / float(steps.sum())) ** 0.5
    # Percentile intervals of skewed ratios fall a little short of 0.95; three standard errors
    # of 400 trials are 0.033.
    assert (0.92 if requests == 6 else 0.91) <= covered / trials <= 0.985
    # Steps taken for independent would promise far too much: the bug this module is against.
    assert naive / trials < 0.75
    assert widths < 0.5 if requests == 6 else 0.06 < widths < 0.12


def test_intervals_hold_their_ratio_and_are_the_same_again() -> None:
    hits, steps = synthetic(20, 5)
    both = torch.cat([hits, 2 * hits], dim=1)
    weights = draw_weights(20, seed=3)
    first = ratio_intervals(both, steps, weights)
    share = float(hits.sum() / steps.sum())
    assert first[0, 0] < share < first[0, 1]
    torch.testing.assert_close(first[1], 2 * first[0])
    assert torch.equal(first, ratio_intervals(both, steps, draw_weights(20, seed=3)))
    assert not torch.equal(first, ratio_intervals(both, steps, draw_weights(20, seed=4)))


def test_requests_without_a_difference_leave_no_doubt() -> None:
    steps = torch.tensor([10, 20, 40])
    spans = ratio_intervals((steps / 2)[:, None], steps, draw_weights(3, seed=0))
    torch.testing.assert_close(spans, torch.tensor([[0.5, 0.5]], dtype=torch.float64))


def test_one_request_has_no_interval() -> None:
    with pytest.raises(ValueError, match="two requests"):
        ratio_intervals(torch.ones(1, 1), torch.ones(1), draw_weights(1, seed=0))
