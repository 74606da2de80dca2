"""Why K is what it is, in one sentence for people, from a state of the policy."""

from __future__ import annotations

from typing import Any

from drafters.config import HEAD
from drafters.control.objective import FIXED, OFF


def k_reason(state: dict[str, Any]) -> str:
    """The reason for K in a state of the policy (Controller.snapshot), and what lookups are worth:
    a sentence without a full stop, in which a step with drafts of the head is compared with one
    without."""
    if state["batch_k"] < state["k"]:
        return "off: no request of the latest step may have drafts"
    adapts = state["objective"] not in (OFF, FIXED)
    return _of_head(state) + (_of_lookups(state["lookups"]) if adapts else "")


def _of_lookups(rows: list[dict[str, Any]]) -> str:
    """What lookups bring, by the class of matches that was seen most; nothing before any was."""
    most = max(rows, key=lambda row: row["trials"], default=None)
    if most is None or not most["trials"]:
        return ""
    return (
        f"; a lookup with a match of {_count(most['match'], 'token')} brings "
        f"{most['tokens']:.1f} tokens"
    )


def _of_head(state: dict[str, Any]) -> str:
    """The reason for the head's K."""
    k, costs = state["k"], state["costs"]
    name = _count(k, "draft token") if k else "off"
    if state["objective"] in (OFF, FIXED):
        return f"{name}: the objective is {state['objective']}"
    if HEAD in state["available_sources"] and HEAD not in state["sources"]:
        return "off: the head is not among the sources"
    if not costs:
        return f"{name}: no step has been measured yet"
    if len(costs) == 1:
        return "off: there is no head"
    by_k = {row["k"]: row for row in costs}
    plain = by_k[0]
    best = max(costs[1:], key=lambda row: row["tokens_per_second"])
    drafting = by_k[k] if k else best
    longer = drafting["step_seconds"] / plain["step_seconds"]
    more = drafting["step_tokens"] / plain["step_tokens"]
    reason = (
        f"{name}: at {_count(state['batch'] or 1, 'request')} a step with "
        f"{_count(drafting['k'], 'draft token')} takes {longer:.1f} times as long and makes "
        f"{more:.1f} times the tokens, {_how_known(plain if k else drafting, k)}"
    )
    if state["waits_for_catch_up"]:
        reason += "; drafts start once they are sure to pay for what the drafter must read first"
    return reason


def _how_known(alternative: dict[str, Any], k: int) -> str:
    """How the cost of the alternative is known: that of no drafts, or of drafts where K is 0."""
    steps = alternative["steps_measured"]
    subject = "without drafts " if k else ""
    known = f"measured in {_count(steps, 'step')}" if steps else "estimated from other loads or K"
    return subject + known


def _count(number: float, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"
