"""What the worker sends to the scheduler with a step's tokens: drafts and times; and what the
scheduler sends to the worker with a step: what each source of drafts is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.v1.outputs import DraftTokenIds

from drafters.control.policy import Match
from drafters.control.sources.draft_plan import DraftPlan

_ATTRIBUTE = "aerie"  # of ModelRunnerOutput and SchedulerOutput, which are pickled with all of it


def attach_plan(scheduled: Any, plan: DraftPlan | None) -> None:
    """Attach the plan of a step to its SchedulerOutput; None where the head alone drafts."""
    if plan is not None:
        setattr(scheduled, _ATTRIBUTE, plan)


def plan_of(scheduled: Any) -> DraftPlan | None:
    """The plan that is attached to a SchedulerOutput."""
    plan: DraftPlan | None = getattr(scheduled, _ATTRIBUTE, None)
    return plan


@dataclass(frozen=True)
class WorkerStepOutput:
    """Drafts for the next step, and the seconds of this one (see drafters.control.policy.Step), or
    of the step before: on a GPU the V2 runner gives its tokens while the device still drafts.

    vLLM's engine core would ask the workers for `drafts` in a call of its own (v1/engine/core.py,
    post_step), which costs a round trip between processes at every step, also at K = 0.

    A request's drafts have one source: the head, or a lookup for those in `looked_up`.
    """

    drafts: DraftTokenIds | None = None
    target_seconds: float = 0.0
    draft_seconds: float = 0.0
    of_step_before: bool = False
    head_k: int | None = None  # K of the head's pass, 0 if it had none; None: as was scheduled
    looked_up: tuple[str, ...] = ()  # requests of which `drafts` come from a lookup
    matches: tuple[Match, ...] = ()  # that this step's tokens were compared with
    missed_tokens_read: int = 0  # tokens of earlier steps that the head's pass read, too

    def attach(self, output: Any) -> None:
        """Attach this to a step's ModelRunnerOutput."""
        setattr(output, _ATTRIBUTE, self)

    @classmethod
    def of(cls, output: Any) -> WorkerStepOutput:
        """What is attached to a ModelRunnerOutput; an empty one if nothing is."""
        extras: WorkerStepOutput = getattr(output, _ATTRIBUTE, None) or cls()
        return extras
