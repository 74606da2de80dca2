"""How long the target and the drafter take in each step, without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from drafters.vllm.scheduling.step_output import WorkerStepOutput


@dataclass(frozen=True)
class StepMarks:
    """Where a step begins, where its tokens are sampled, and where it is drafted: CUDA events, or
    times by `perf_counter` on a CPU, whose work is done when a mark is made."""

    began: Any
    sampled: Any
    drafted: Any

    def seconds(self) -> tuple[float, float] | None:
        """Seconds of the target, its inputs and the sampling, and of the drafter. None while the
        device has not come to the end: it is not waited for."""
        if isinstance(self.drafted, float):
            return self.sampled - self.began, self.drafted - self.sampled
        if not self.drafted.query():
            return None
        target, draft = (
            self.began.elapsed_time(self.sampled),
            self.sampled.elapsed_time(self.drafted),
        )
        return target / 1e3, draft / 1e3  # from milliseconds


def mark(device: torch.device) -> Any:
    """A mark behind all work that the device was given so far."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class TimedOutput(AsyncModelRunnerOutput):
    """A step's output, with the seconds of the step before attached when it is read.

    The device still drafts when the tokens of a step are read, but has drafted in the step before:
    its work is in order.
    """

    def __init__(self, output: AsyncModelRunnerOutput, before: StepMarks | None) -> None:
        self._output, self._before = output, before

    def get_output(self) -> ModelRunnerOutput:
        """Wait for the tokens, as vLLM does."""
        output = self._output.get_output()
        target, draft = (self._before and self._before.seconds()) or (0.0, 0.0)
        WorkerStepOutput(None, target, draft, of_step_before=True).attach(output)
        return output
