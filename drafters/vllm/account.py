"""What a step that has run tells the policy of its drafts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from drafters.control.policy import Run, Step
from drafters.vllm.ask import Ask


class Verified(NamedTuple):
    """A request's drafts, counted by vLLM's scheduler."""

    name: str
    drafts: int
    accepted: int
    made: int  # tokens, none behind the request's end


class Ran(NamedTuple):
    """A step as it was just after it; what it says of drafts is counted when somebody asks."""

    step: Step  # without what `Account` counts
    asked: Ask  # for the drafts that it verified
    verified: list[Verified]
    limits: Mapping[str, int]  # of requests that may have fewer than k_max drafts


class Account:
    """Each request's run, and from that what its drafts were. Steps come in order."""

    def __init__(self, k_max: int) -> None:
        self._k_max = k_max
        self._runs: dict[str, Run] = {}  # of a next step; without: of a run's first

    def count(self, ran: Ran) -> Step:
        """The whole step."""
        step, asked, k_max = ran.step, ran.asked, self._k_max
        drafted, accepted, doubted = [0] * k_max, [0] * k_max, [0] * (k_max if asked.doubts else 0)
        left_out_tokens = grown_tokens = 0
        runs, goes_on = [], {}
        for name, drafts, right, made in ran.verified:
            for counters, positions in ((drafted, drafts), (accepted, right)):
                for position in range(positions):
                    counters[position] += 1
            run = self._runs.get(name, Run())._replace(made=made)
            runs.append(run)
            limit = ran.limits.get(name, k_max)
            left_out = asked.left_out(limit, run.before, drafts)
            if left_out:
                doubted[drafts] += 1
            left_out_tokens += left_out
            grown_tokens += asked.beyond(limit, run.before)
            if right == drafts:
                goes_on[name] = run.next(left_out=left_out > 0)
        self._runs = goes_on if step.k else {}
        return step._replace(
            load=step.load._replace(doubted_tokens=left_out_tokens, grown_tokens=grown_tokens),
            drafted=tuple(drafted),
            accepted=tuple(accepted),
            runs=tuple(runs),
            doubted=tuple(doubted),
        )
