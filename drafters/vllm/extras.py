"""What scheduler and worker tell each other beside what vLLM lets them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.v1.outputs import DraftTokenIds

_ATTRIBUTE = "aerie"  # of a ModelRunnerOutput or SchedulerOutput, pickled with all they have


@dataclass(frozen=True)
class Extras:
    """From the worker, with a step's output. `drafts` for the next step: vLLM's engine core would
    ask the workers for them in a call of its own (v1/engine/core.py, post_step), which costs a step
    a round trip between processes, also when nothing was drafted. Seconds as in
    drafters.control.policy.Step."""

    drafts: DraftTokenIds | None = None
    target_seconds: float = 0.0
    draft_seconds: float = 0.0

    def attach(self, output: Any) -> None:
        """To a ModelRunnerOutput."""
        setattr(output, _ATTRIBUTE, self)

    @classmethod
    def of(cls, output: Any) -> Extras:
        """An empty one where the worker sent none."""
        extras: Extras = getattr(output, _ATTRIBUTE, None) or cls()
        return extras


def share_drafts(scheduled: Any, drafts: Mapping[str, int]) -> None:
    """Ask for as many draft tokens of these requests in place of K, in a SchedulerOutput."""
    setattr(scheduled, _ATTRIBUTE, drafts)


def shared_drafts(scheduled: Any) -> Mapping[str, int]:
    """What was asked for; nothing where K is for all."""
    drafts: Mapping[str, int] = getattr(scheduled, _ATTRIBUTE, {})
    return drafts
