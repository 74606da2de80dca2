"""Readiness checks: the target computes finite numbers, and the head drafts.

vLLM only logs that a plugin or a drafter failed to load, and then decodes without drafts. It serves
damaged weights as if they were sound: texts are empty, and no draft is accepted. These checks find
both before the first request is taken.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from app.engine.configuration.runner import Blame
from app.engine.start_failure import StartFailureError
from app.errors import StartupError
from app.llm.head_acceptance import FirstDrafts, far_below, least_expected, warning
from app.observability import metrics
from app.settings import Settings
from drafters.control.objective import OFF, Objective

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 24
# Three continuations, so that a few dozen first drafts are verified.
WARM_UP_TEXTS = (
    'def read_lines(path):\n    """Return the lines of a text file."""\n',
    "The capital of France is Paris, and the capital of Italy is",
    "Here are the numbers from one to twenty: 1, 2, 3, 4, 5, 6,",
)
# Without a head: a text that repeats itself, continued by one token again and again, whatever the
# model, so that a lookup finds what follows.
REPEATED_TEXT = "one two three four five six " * 4
# What looks up: this project's drafter on V1, and a subclass of vLLM's own on V2.
LOOKUPS = ("LookupProposer", "LookupSpeculator")
# This project's drafters, and whether each drafts in parallel (drafters/vllm/v1/parallel.py,
# sequential.py, v2/speculator.py, sequential.py).
DRAFTERS = {
    "ParallelDrafter": True,
    "ParallelSpeculator": True,
    "SequentialDrafter": False,
    "SequentialSpeculator": False,
}
STATS_TIMEOUT_S = 10.0


class DraftCounts(Protocol):
    """Counts of drafts so far (app/llm/steps.py)."""

    draft_tokens: int
    first_drafts: FirstDrafts


class WarmUp(Protocol):
    """Calls into the engine that the warm-up makes (app/llm/async_llm.py)."""

    async def answer(self, texts: Sequence[str], tokens: int) -> None:
        """Continue all texts at once, each by `tokens` tokens."""
        ...

    async def repeat(self, text: str, tokens: int) -> None:
        """Continue a text by `tokens` tokens, all of them its last one."""
        ...

    async def speculation(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Run a command of DraftingScheduler.speculation; returns the policy's state."""
        ...


def check_reports(
    settings: Settings, reports: list[dict[str, Any] | None]
) -> dict[str, Any] | None:
    """Compare every worker's report with the settings; returns the first one of a drafter. Those
    of workers that draft nothing by design (earlier pipeline stages) are empty.

    Raises StartFailureError naming what is wrong.
    """
    if not settings.speculates:
        return None
    wanted = settings.speculation
    drafting = [report for report in reports if report != {}]
    for report in drafting or [None]:
        if report is None:
            raise _undrafted("the engine runs without a drafter although one was asked for")
        if not settings.has_head:
            _check_lookup(settings, report)
            continue
        parallel = DRAFTERS.get(report["proposer"])
        if parallel is None:
            raise _undrafted(
                f"the engine drafts with {report['proposer']}, not with a drafter of this package: "
                "its plugin did not load; the error is in the log above"
            )
        if report["parallel"] != parallel:
            raise _undrafted(
                f"{report['proposer']} was given parallel_drafting {report['parallel']}: it needs "
                "another kind of head"
            )
        if parallel and not report["mask_hidden"] and settings.engine.has_weights:
            raise StartFailureError(
                f"the head {wanted.drafter} has no mask_hidden: it is no P-EAGLE head",
                Blame.HEAD,
                "head",
            )
        if report["k"] != wanted.k:
            raise _undrafted(f"the engine drafts {report['k']} tokens, {wanted.k} were asked for")
    return drafting[0]


def _check_lookup(settings: Settings, report: dict[str, Any]) -> None:
    """Check the report of a worker that has no head."""
    if report["proposer"] not in LOOKUPS:
        raise _undrafted(f"the engine drafts with {report['proposer']}, not by lookup")
    if report["k"] != settings.speculation.lookup_k:
        raise _undrafted(
            f"the engine looks up {report['k']} tokens, {settings.speculation.lookup_k} were asked "
            "for"
        )


def _undrafted(message: str) -> StartFailureError:
    """The failure of an engine that does not draft as it was asked to."""
    return StartFailureError(message, Blame.DRAFTS, "no_drafts")


async def check_finite(settings: Settings, llm: WarmUp) -> None:
    """Run the warm-up requests. Raises StartupError for logits that are not finite.

    It is a StartFailureError if they are finite at K = 0: then the drafts, or the graphs and
    kernels that verify them, are at fault and not the target.
    """
    if await _is_finite(llm):
        return
    if settings.speculates:
        await llm.speculation("steer", Objective(OFF).entries())
        if await _is_finite(llm):
            message = "logits are not finite with drafts, and finite at K = 0"
            raise StartFailureError(message, Blame.DRAFTS, "non_finite")
    raise StartupError(
        f"the model {settings.model.model} computes values that are not finite: its weights "
        f"are damaged, or do not fit into their data type (--dtype {settings.model.dtype})"
    )


async def _is_finite(llm: WarmUp) -> bool:
    from app.llm.vllm_errors import NonFiniteError

    try:
        await llm.answer(WARM_UP_TEXTS, WARM_UP_TOKENS)
    except NonFiniteError:
        return False
    return True


async def check_drafts(settings: Settings, llm: WarmUp, drafts: DraftCounts) -> int:
    """Number of tokens drafted in the warm-up requests. Raises StartFailureError for zero."""
    if not settings.speculates:
        return 0
    deadline = asyncio.get_running_loop().time() + STATS_TIMEOUT_S
    while drafts.draft_tokens == 0:
        if asyncio.get_running_loop().time() > deadline:
            raise _undrafted("the warm-up request ran, but no token was drafted")
        if not settings.has_head:
            await llm.repeat(REPEATED_TEXT, WARM_UP_TOKENS)
        await asyncio.sleep(0.05)  # the count travels with the next engine output
    return drafts.draft_tokens


def check_acceptance(settings: Settings, drafts: DraftCounts) -> None:
    """Warn of a head whose drafts were hardly accepted in the warm-up requests.

    A warning only: every draft is verified, so that answers are right whatever the head drafts.
    """
    if not settings.has_head or not settings.engine.has_weights:
        return
    drafter, seen = settings.speculation.drafter, drafts.first_drafts
    least = least_expected(drafter, settings.speculation.k)
    low = far_below(seen, least)
    metrics.WARM_UP_ACCEPTANCE.set(seen.ratio)
    metrics.WARM_UP_ACCEPTANCE_LOW.set(low)
    if low:
        logger.warning("%s", warning(seen, least, head=drafter, target=settings.model.model))
