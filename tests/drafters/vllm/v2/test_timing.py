"""Seconds of a step's target and drafter, from marks that nothing waits for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafters.vllm.scheduling.step_output import WorkerStepOutput
from drafters.vllm.v2.timing import StepMarks, TimedOutput, mark


class Event:
    """A CUDA event at a time in milliseconds; None: the device has not come to it."""

    def __init__(self, at: float | None) -> None:
        self.at = at

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, other: Event) -> float:
        if self.at is None or other.at is None:
            raise RuntimeError("the event was not recorded, or waited for")
        return other.at - self.at


@pytest.mark.parametrize(
    ("marks", "seconds"),
    [
        (StepMarks(Event(10.0), Event(18.0), Event(20.0)), (0.008, 0.002)),
        (StepMarks(Event(10.0), Event(18.0), Event(None)), (0.0, 0.0)),
        (None, (0.0, 0.0)),  # the first step
    ],
)
def test_a_step_brings_the_seconds_of_the_one_before(
    marks: StepMarks | None, seconds: tuple[float, float]
) -> None:
    output: Any = SimpleNamespace(sampled_token_ids=[[1]])
    stock: Any = SimpleNamespace(get_output=lambda: output)
    assert TimedOutput(stock, marks).get_output() is output
    extras = WorkerStepOutput.of(output)
    assert (extras.target_seconds, extras.draft_seconds) == pytest.approx(seconds)
    assert extras.of_step_before


def test_on_a_cpu_marks_are_times() -> None:
    cpu = torch.device("cpu")
    target, draft = StepMarks(mark(cpu), mark(cpu), mark(cpu)).seconds() or (-1.0, -1.0)
    assert 0.0 <= target < 1.0 and 0.0 <= draft < 1.0
