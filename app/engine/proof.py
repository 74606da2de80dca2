"""Evidence that the head drafts: readiness depends on it.

vLLM only logs a plugin or a drafter that falls away, and then decodes plainly. A gateway
that was asked to speculate must find out before it takes the first request.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from app.errors import StartupError
from app.settings import Settings

WARM_UP_TOKENS = 24
DRAFTER = "ParallelDrafter"  # drafters/vllm/drafter.py
STATS_TIMEOUT_S = 10.0


class Drafts(Protocol):
    """Where the count of draft tokens so far comes from (app/engine/steps.py)."""

    draft_tokens: int


def check_reports(
    settings: Settings, reports: list[dict[str, Any] | None]
) -> dict[str, Any] | None:
    """Compare every worker's account with what was asked for; returns the first account.

    Raises StartupError naming what is wrong.
    """
    if not settings.speculates:
        return None
    wanted = settings.speculation
    for report in reports or [None]:
        if report is None:
            raise StartupError("the engine runs without a drafter although one was asked for")
        if report["proposer"] != DRAFTER:
            raise StartupError(
                f"the engine drafts with {report['proposer']}, not with ours: the plugin of this "
                "package did not load; its error is in the log above"
            )
        if not report["parallel"]:
            raise StartupError(f"{report['proposer']} does not draft in parallel: no P-EAGLE head")
        if not report["mask_hidden"] and settings.engine.has_weights:
            raise StartupError(f"the head {wanted.drafter} has no mask_hidden: no P-EAGLE head")
        if report["k"] != wanted.k:
            raise StartupError(f"the engine drafts {report['k']} tokens, asked for {wanted.k}")
    return reports[0]


async def check_drafts(settings: Settings, drafts: Drafts) -> int:
    """After the warm-up request: how many tokens were drafted. Zero is a StartupError."""
    if not settings.speculates:
        return 0
    deadline = asyncio.get_running_loop().time() + STATS_TIMEOUT_S
    while drafts.draft_tokens == 0:
        if asyncio.get_running_loop().time() > deadline:
            raise StartupError("the warm-up request ran, but the head drafted no token")
        await asyncio.sleep(0.05)  # the count travels with the next engine output
    return drafts.draft_tokens
