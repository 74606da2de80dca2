"""What a step's output carries from the worker to the scheduler beside its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.outputs import DraftTokenIds

_ATTRIBUTE = "aerie"  # of a ModelRunnerOutput, which is pickled with all it has


@dataclass(frozen=True)
class WorkerStepOutput:
    """Drafts for the next step, and what this one took.

    vLLM's engine core would ask the workers for `drafts` in a call of its own (v1/engine/core.py,
    post_step), which costs a step a round trip between processes, also when nothing was drafted.
    Seconds are those of drafters.control.policy.Step.
    """

    drafts: DraftTokenIds | None = None
    target_seconds: float = 0.0
    draft_seconds: float = 0.0

    def attach(self, output: Any) -> None:
        """Attach these to a step's ModelRunnerOutput."""
        setattr(output, _ATTRIBUTE, self)

    @classmethod
    def of(cls, output: Any) -> WorkerStepOutput:
        """An empty one where the worker sent none."""
        extras: WorkerStepOutput = getattr(output, _ATTRIBUTE, None) or cls()
        return extras
