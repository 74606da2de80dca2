"""Client of the policy that chooses K: sets its objective, measures step costs, polls its state.

The policy runs in the engine core's scheduler (drafters/vllm/scheduling/scheduler.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from app.engine import calibration_file
from app.engine.calibration import calibration
from app.engine.calibration_file import CalibrationError
from app.engine.heads.drafts import DraftsByGeneration
from app.engine.heads.generations import SwapError
from app.errors import ApiError
from app.observability import metrics
from app.observability.k_reason import k_reason
from app.settings import Settings
from drafters.config import SOURCES
from drafters.control.cost_table import Cell
from drafters.control.objective import FIXED, Objective, ObjectiveError
from drafters.learning.lineage import STARTED_WITH
from drafters.machine import cpu_name

logger = logging.getLogger(__name__)

POLL_S = 1.0
LOG_INTERVAL_S = 60.0  # least time between log lines that say whether drafts are made, and why
WINDOWS_S = {"1m": 60.0, "5m": 300.0, "15m": 900.0}
LARGEST_BATCH = 64  # measured at start-up; larger batches are estimated from the nearest one
STEPS = 4  # measured at each batch and K


class EngineCalls(Protocol):
    """Calls into the engine that the client makes (app/llm/async_llm.py)."""

    async def speculation(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Run a command of DraftingScheduler.speculation; returns the policy's state."""
        ...

    async def head(self, command: str, folder: str) -> list[dict[str, Any]]:
        """Run a command about the draft head; returns the answer of each engine core."""
        ...

    async def run_dummy_batch(self, requests: int, tokens: int) -> None:
        """Run `requests` requests at once, each with `tokens` output tokens, in one batch."""
        ...


@dataclass(frozen=True)
class _Sample:
    at: float
    decode_s: float
    plain_s: float


class SpeculationClient:
    """Objective, state and speed-up of speculation.

    The client outlives an engine: measured costs and the objective hold for the next one.
    """

    def __init__(
        self,
        core: EngineCalls,
        settings: Settings,
        fingerprint: Mapping[str, str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._settings = settings.speculation
        self._fingerprint = fingerprint
        self._clock = clock
        self._samples: deque[_Sample] = deque()
        self._last_log: tuple[bool, float] | None = None  # whether drafts were made, and when
        self._last: dict[str, Any] | None = None
        self._cells: tuple[Cell, ...] = ()  # measured costs
        self._objective = self._settings.aim()
        self._objective_known = True  # False until the policy's next state says which one holds
        self._head_folder = ""  # of the head in force
        self.drafts = DraftsByGeneration()
        # States are counted in the order that they were made in, and changes build on each other.
        self._call_lock = asyncio.Lock()
        self._state_call: asyncio.Task[dict[str, Any]] | None = None  # that `state` waits for

    async def begin(self, max_requests: int) -> None:
        """Give the policy measured or saved step costs, then the objective of the settings.
        `max_requests` fit into a batch."""
        self._cells = await self._calibrate(min(max_requests, LARGEST_BATCH))
        await self._load_calibration()
        async with self._call_lock:
            await self._set_objective(self._objective)

    async def resume(self, core: EngineCalls) -> None:
        """Give another engine's policy the step costs and the objective of the last one."""
        self._core, self._last, self._state_call = core, None, None
        self.drafts.generation = STARTED_WITH
        self._head_folder = ""
        self._call_lock = (
            asyncio.Lock()
        )  # a call into the engine that is gone may hold the old lock
        self._samples.clear()
        await self._load_calibration()
        async with self._call_lock:
            await self._set_objective(self._objective)

    async def steer(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Change objective, K, `tpot_s` or sources at run time. Raises ApiError 400 naming the
        field."""
        async with self._call_lock:
            state = self._last
            if state is None or not self._objective_known:
                state = await self._call("state", {})
            try:
                available = state.get("available_sources", SOURCES)
                objective = self._objective.changed(changes)
                objective.validated_for(state["k_max"], available)
            except ObjectiveError as error:
                message = f"'{error.field}': {error.problem}."
                raise ApiError(400, message, param=error.field) from None
            return self._with_speedup(await self._set_objective(objective))

    async def _set_objective(self, objective: Objective) -> dict[str, Any]:
        """Set an objective, for the next engine too; returns the policy's state.

        The caller holds the lock. If it is cancelled meanwhile, the objective is what the policy's
        next state says: the engine may have made the change or not.
        """
        self._objective_known = False
        return await self._call("steer", objective.entries())

    async def swap_head(self, folder: str, generation: int) -> float:
        """Put the head in `folder` in force, "" for the one that the engine was started with;
        returns the longest pause between two steps that it made, in seconds.

        Raises SwapError if an engine core refuses the head: nothing has changed then. Raises
        ApiError 503 if the engine dies meanwhile.
        """
        async with self._call_lock:
            pauses = [await self._head("stage", folder)]
            await self._call("state", {})  # what was drafted so far is the head's before
            try:
                pauses.append(await self._head("swap", folder))
            except SwapError:  # of several engine cores: none keeps it if one refuses
                with contextlib.suppress(SwapError):
                    await self._head("swap", self._head_folder)
                raise
            self._head_folder = folder
            self.drafts.generation = generation
            await self._call("head_changed", {})
            return max(pauses)

    async def drop_head(self) -> None:
        """Free the memory of the head that is not in force."""
        await self._head("drop", "")

    async def _head(self, command: str, folder: str) -> float:
        answers = await self._core.head(command, folder)
        if errors := sorted({answer["error"] for answer in answers if "error" in answer}):
            raise SwapError("; ".join(errors))
        return float(max(answer["seconds"] for answer in answers))

    async def state(self) -> dict[str, Any]:
        """The policy's state, with the recent speed-up. The metrics are updated with it.

        However many callers wait, they share one call into the engine, so that a change waits for
        no more than that.
        """
        if self._state_call is None or self._state_call.done():
            self._state_call = asyncio.create_task(self._command("state", {}))
            # Whoever waited for an error may have left.
            self._state_call.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._with_speedup(await asyncio.shield(self._state_call))

    def latest(self) -> dict[str, Any] | None:
        """The state of the last poll, without a call into the engine; None before the first."""
        return self._with_speedup(self._last) if self._last is not None else None

    async def poll(self) -> None:
        """Poll the state for the metrics until cancelled."""
        while True:
            with contextlib.suppress(ApiError):  # the engine is dying, which its supervisor notices
                self.sample(await self._command("state", {}))
            await asyncio.sleep(POLL_S)

    def sample(self, state: dict[str, Any]) -> None:
        """Keep a state as a sample for `speedup`."""
        now, totals = self._clock(), state["totals"]
        self._samples.append(_Sample(now, totals["decode_seconds"], totals["plain_seconds"]))
        while now - self._samples[0].at > max(WINDOWS_S.values()) + POLL_S:
            self._samples.popleft()
        self._log_change(state, now)

    def _log_change(self, state: dict[str, Any], now: float) -> None:
        """Log why drafts are made or not, when that has changed under requests."""
        drafting = state["batch_k"] > 0
        if not state["batch"] or (self._last_log is not None and self._last_log[0] == drafting):
            return
        if self._last_log is None or now - self._last_log[1] >= LOG_INTERVAL_S:
            self._last_log = drafting, now
            logger.info("speculation: %s", state["why"])

    def speedup(self, window_s: float) -> float | None:
        """Decoding time without drafts over decoding time with them, in the last `window_s`.

        None while nothing was decoded.
        """
        if not self._samples:
            return None
        last = self._samples[-1]
        first = next(s for s in self._samples if s is last or last.at - s.at <= window_s)
        decode = last.decode_s - first.decode_s
        return (last.plain_s - first.plain_s) / decode if decode > 0 else None

    async def _command(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Run a command; returns the policy's state, which the metrics are updated with."""
        async with self._call_lock:
            return await self._call(command, arguments)

    async def _call(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Run a command as `_command` does. The caller holds the lock."""
        state = await self._core.speculation(command, arguments)
        state = {**state, "why": k_reason(state)}
        metrics.count_speculation(state, self._last)
        self.drafts.count(state, self._last)
        self._last = state
        if not self._objective_known:  # whoever waited for it may have given up
            self._objective, self._objective_known = _objective_of(state), True
        return state

    def _with_speedup(self, state: dict[str, Any]) -> dict[str, Any]:
        speedup = {name: self.speedup(seconds) for name, seconds in WINDOWS_S.items()}
        return {**state, "speedup": speedup}

    async def _load_calibration(self) -> None:
        """Give the policy the measured costs, if any, in the place of what the warm-up taught."""
        await self._core.speculation("load_calibration", {"cells": list(map(list, self._cells))})

    async def _calibrate(self, max_requests: int) -> tuple[Cell, ...]:
        file = Path(self._settings.calibration_file) if self._settings.calibration_file else None
        cells: tuple[Cell, ...] = ()
        if file is not None and file.exists():
            try:
                cells = calibration_file.read(file, self._fingerprint)
            except CalibrationError as error:
                logger.warning("measuring step costs again: %s", error)
        if not cells and self._settings.calibration_s > 0:
            began = self._clock()
            cells = await self._measure(max_requests)
            took = self._clock() - began
            logger.info("measured %d step costs in %.1f s", len(cells), took)
            if file is not None:
                try:
                    calibration_file.save(file, cells, self._fingerprint)
                except OSError as error:  # the next start measures again
                    logger.warning("cannot keep the measured step costs: %s", error)
        return cells

    async def _measure(self, max_requests: int) -> tuple[Cell, ...]:
        """Measure step costs in this task: nothing waits for the engine once it has ended."""
        budget_s = self._settings.calibration_s
        k_max = (await self._core.speculation("state", {}))["k_max"]
        asking = calibration(self._clock, k_max=k_max, max_requests=max_requests, budget_s=budget_s)
        cell = next(asking)
        while True:
            seconds = await self._cell(*cell)
            try:
                cell = asking.send(seconds)
            except StopIteration as end:
                cells: tuple[Cell, ...] = end.value
                return cells

    async def _cell(self, requests: int, k: int) -> Sequence[float]:
        """Seconds of steps with `requests` requests that verify and draft K tokens each."""
        await self._core.speculation("steer", Objective(FIXED, k=k).entries())
        await self._core.run_dummy_batch(
            requests, STEPS + 2 + k
        )  # a few steps, however much is accepted
        steps = (await self._core.speculation("recent", {}))["steps"]
        wanted = (requests, requests * k, 0, k)
        seconds = [
            step["seconds"]
            for step in steps
            if wanted
            == (
                *(step["load"][n] for n in ("requests", "draft_tokens", "prefill_tokens")),
                step["k"],
            )
        ]
        if not seconds:  # no step had all of its drafts: take the last one
            seconds = [steps[-1]["seconds"]]
        return seconds[-2 * STEPS :]


def _objective_of(state: Mapping[str, Any]) -> Objective:
    """The objective that a state of the policy has: its K is the objective's where it is fixed."""
    name, sources = state["objective"], state.get("sources")
    return Objective(
        name,
        k=state["k"] if name == FIXED else None,
        tpot_s=state["tpot_s"],
        sources=None if sources == state.get("available_sources") else sources,
    )


def fingerprint(settings: Settings, versions: Mapping[str, str]) -> dict[str, str]:
    """Everything that step costs depend on: hardware, model, head, engine arguments, versions.

    Of the engine arguments it has a hash: a calibration file is no place for their secrets.
    """
    model, speculation, engine = settings.model, settings.speculation, settings.engine
    arguments = json.dumps(engine.engine_args, sort_keys=True, default=str)
    return {
        "machine": f"{platform.machine()} {cpu_name()}",
        "cpus": str(len(os.sched_getaffinity(0))),
        "model": model.model,
        "revision": str(model.revision),
        "quantization": str(model.quantization),
        "drafter": str(speculation.drafter),
        "k": str(speculation.k),
        "lookup_k": str(speculation.lookup_k),
        "tensor_parallel_size": str(engine.tensor_parallel_size),
        "enforce_eager": str(engine.enforce_eager),
        "engine_args": hashlib.sha256(arguments.encode()).hexdigest()[:16],
        **versions,
    }
