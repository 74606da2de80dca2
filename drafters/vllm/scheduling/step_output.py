"""What the worker sends to the scheduler with a step's tokens: drafts and times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.outputs import DraftTokenIds

_ATTRIBUTE = "aerie"  # of a ModelRunnerOutput, which is pickled with all it has


@dataclass(frozen=True)
class WorkerStepOutput:
    """Drafts for the next step, and the seconds of this one (see drafters.control.policy.Step), or
    of the step before: on a GPU the V2 runner gives its tokens while the device still drafts.

    vLLM's engine core would ask the workers for `drafts` in a call of its own (v1/engine/core.py,
    post_step), which costs a round trip between processes at every step, also at K = 0.
    """

    drafts: DraftTokenIds | None = None
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    of_step_before: bool = False

    def attach(self, output: Any) -> None:
        """Attach this to a step's ModelRunnerOutput."""
        setattr(output, _ATTRIBUTE, self)

    @classmethod
    def of(cls, output: Any) -> WorkerStepOutput:
        """What is attached to a ModelRunnerOutput; an empty one if nothing is."""
        extras: WorkerStepOutput = getattr(output, _ATTRIBUTE, None) or cls()
        return extras
