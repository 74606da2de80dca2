"""Which generation of the draft head drafts: loaded at the start, pinned, or tried and kept.

The lineage is on disk (drafters/learning/lineage.py), and what an operator or the learner writes
there is noticed within POLL_S seconds. The engine always starts with generation 0; another one
takes its place by a swap, so that a generation that cannot be loaded costs nothing but itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Protocol

from app.engine.heads.trial import Trial, TrialPlan
from app.errors import ApiError
from app.observability import metrics
from drafters.learning.lineage import (
    CANDIDATE,
    FOLDER,
    KEPT,
    REPLAY,
    ROLLED_BACK,
    STARTED_WITH,
    Generation,
    Lineage,
)

logger = logging.getLogger(__name__)

POLL_S = 1.0
READ_S = 5.0  # the longest that a start waits for the folder
_UNREADABLE = "the folder of learning cannot be read"


class SwapError(Exception):
    """The engine refused a head; the message says why. Nothing has changed."""


class HeadCalls(Protocol):
    """Calls about the head that go to the engine (app/engine/speculation_client.py)."""

    async def swap_head(self, folder: str, generation: int) -> float:
        """Put the head in `folder` in force; returns the longest pause between steps, in seconds.
        Raises SwapError, and ApiError if the engine dies."""
        ...

    async def drop_head(self) -> None:
        """Free the memory of the head that is not in force."""
        ...

    def latest(self) -> dict[str, Any] | None:
        """The policy's state within the last second."""
        ...


@dataclass(frozen=True)
class _View:
    """What the folder says."""

    generations: dict[int, Generation]
    in_force: int
    pinned: int | None

    def folder(self, number: int) -> str:
        """The folder of a generation's head. Raises KeyError if there is none, or no weights."""
        if number == STARTED_WITH:
            return ""
        generation = self.generations[number]
        if not generation.has_weights:
            raise KeyError(number)
        return str(generation.folder)

    def candidate(self, incumbent: int) -> int | None:
        """The newest generation that waits for its trial; older ones than the one in force, which
        descends from them or from better ones, do not any more."""
        waiting = [
            number
            for number, generation in self.generations.items()
            if generation.verdict == CANDIDATE and number > incumbent
        ]
        return max(waiting, default=None)


class HeadGenerations:
    """The generations of a learning head in service. Everything runs on the event loop's thread,
    except for reading and writing the lineage."""

    def __init__(
        self,
        folder: Path,
        first_head: Callable[[], str],
        random: Random | None = None,
        plan: TrialPlan | None = None,
        older_first_head: Callable[[], str] = str,
    ) -> None:
        """`first_head` names the head of the gateway's settings (drafters/learning/first_head.py),
        `older_first_head` as an older version did; they may read files, and raise OSError."""
        self.generation = STARTED_WITH  # that drafts now
        self.pinned: int | None = None
        self.problem: str | None = None  # why another one drafts than the folder says
        self.trial: Trial | None = None
        self._folder = folder
        self._first_head = first_head
        self._older_first_head = older_first_head
        self._first_head_name: str | None = None  # what `first_head` has returned
        self._hashing = threading.Lock()
        self._is_begun = False  # whether the lineage was looked at for the running engine
        self._lineage = Lineage(folder)
        self._random = random or Random()
        self._plan = plan
        self._engine: HeadCalls | None = None
        self._lock = asyncio.Lock()
        self._refused: dict[int, str] = {}  # by the running engine -> why
        # Candidate, verdict and record of a trial that ended and could not be kept on disk yet.
        self._unwritten: tuple[int, str, dict[str, Any]] | None = None
        self._followed_pin: int | None = None  # what was pinned when the folder was last followed
        self._changes: set[asyncio.Task[None]] = set()
        self._loading: int | None = None  # while the engine stages it and swaps it in
        self._loaded: set[int] = set()  # generations that the running engine has had in force
        self._known: tuple[int, dict[int, Generation]] | None = None

    def state(self) -> dict[str, Any]:
        """What GET /v1/speculation says of it."""
        trial = None if self.trial is None else self.trial.figures()
        if self.trial is not None and trial is not None:
            trial["drafting"] = self.generation
        return {
            "generation": self.generation,
            "pinned": self.pinned,
            "learned": self.generation != STARTED_WITH,
            "trial": trial,
            "problem": self.problem,
        }

    async def begin(self, engine: HeadCalls) -> None:
        """Load the generation that is in force into an engine that has just started. One that
        cannot be loaded is logged, and generation 0 drafts."""
        self._lock = asyncio.Lock()  # a call into the engine that is gone may hold the old one
        async with self._lock:
            self._engine = engine
            self._is_begun = False
            self._enter(STARTED_WITH)
            self._refused.clear()
            self._loaded.clear()
            self.problem = None
            if self.trial is not None:
                self.trial.interrupt()
            view = None
            if self._loading:  # it may have been what ended the engine; the first head never is
                self._refused[self._loading] = "the engine ended while it was loaded"
                self._loading = None
            # A disk that does not answer, or a head of many gigabytes: `run` goes on with it.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(READ_S):
                    view = await self._view()
            if view is not None:
                await self._follow(view)

    async def _begin_lineage(self) -> None:
        """Look at what the lineage says of the last gateway and of the first head, before anything
        is loaded into an engine. Raises OSError, ValueError and TypeError."""
        if (number := await asyncio.to_thread(self._lineage.loading)) is not None:
            # It may have been what ended the gateway, with its engine.
            self._refused.setdefault(number, "the gateway ended while it was loaded")
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._lineage.note_loading, None)
        first_head = await asyncio.to_thread(self._name_first_head)
        if await asyncio.to_thread(self._lineage.descend_from, first_head, self._older_first_head):
            logger.warning(
                "the gateway was started with another head or target than the generations in "
                "%s descend from: generation 0 is in force",
                self._folder,
            )
        self._is_begun = True

    def _name_first_head(self) -> str:
        """What the first head is called: read once, by whichever thread is first."""
        with self._hashing:
            if self._first_head_name is None:
                self._first_head_name = self._first_head()
            return self._first_head_name

    def stopped(self) -> None:
        """Say that the engine was ended on purpose: no generation is to blame that was loaded
        meanwhile. Blocking."""
        self._loading = None
        with contextlib.suppress(OSError):
            self._lineage.note_loading(None)

    async def run(self) -> None:
        """Follow what the folder says, and try candidates, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            with contextlib.suppress(ApiError):  # the engine is dying: its supervisor notices
                async with self._lock:
                    view = await self._view()
                    if view is not None:
                        await self._advance(view)

    async def pin(self, number: int | None) -> None:
        """Let this generation draft whatever was shown of it; None lets trials choose again.

        Raises ApiError 400 for a generation that is not there or cannot be loaded: then nothing has
        changed. The change is made even if the caller is cancelled meanwhile.
        """
        await self._to_the_end(self._pin(number))

    async def _to_the_end(self, change: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(task)

    async def _pin(self, number: int | None) -> None:
        assert self._engine is not None
        async with self._lock:
            view = await self._view()
            if view is None:
                raise ApiError(503, "The folder of learning cannot be read.", code="engine_busy")
            wanted, before = view.in_force if number is None else number, self.generation
            try:
                await asyncio.to_thread(view.folder, wanted)
            except KeyError:
                if number is not None:
                    message = f"'generation': there is no generation {number} with weights."
                    raise ApiError(400, message, param="generation") from None
            self._refused.pop(wanted, None)  # asked for: try again
            if not await self._load(view, wanted) and number is not None:
                message = f"'generation': {number} cannot be loaded: {self._refused[wanted]}."
                raise ApiError(400, message, param="generation")
            try:
                await asyncio.to_thread(self._lineage.pin, number)
            except (OSError, KeyError) as error:
                logger.error("the pinned generation cannot be kept on disk: %s", error)
                await self._load(view, before)
                if self.trial is not None:
                    self.trial.interrupt()
                message = "The folder of learning cannot be written: nothing has changed."
                raise ApiError(503, message, code="engine_busy") from None
            self.trial = None
            await self._engine.drop_head()
            self.pinned = number
            logger.info("draft head: generation %d, pinned: %s", self.generation, number)

    async def _view(self) -> _View | None:
        """What the folder says; None while it cannot be read."""
        try:
            if not self._is_begun:
                await self._begin_lineage()
            view = await asyncio.to_thread(self._read)
        except (OSError, ValueError, KeyError, TypeError) as error:
            # Whoever may look at figures need not know where the server's files are.
            reason = repr(error).replace(f"{self._folder}{os.sep}", "")
            self._tell(f"{_UNREADABLE}: {reason}")
            return None
        if self.problem is not None and self.problem.startswith(_UNREADABLE):
            self._tell(None)
        self.pinned = view.pinned
        return view

    def _read(self) -> _View:
        try:
            changed = (self._folder / FOLDER).stat().st_mtime_ns
        except FileNotFoundError:
            changed = 0
        if self._known is None or self._known[0] != changed:
            found = {each.number: each for each in self._lineage.generations()}
            # A second change within a tick of the file system's clock has the same time.
            is_settled = time.time_ns() - changed > 1_000_000_000
            self._known = (changed, found) if is_settled else (-1, found)
        return _View(self._known[1], self._lineage.in_force(), self._lineage.pinned())

    async def _follow(self, view: _View) -> None:
        """Load what the folder says drafts. If that cannot be loaded, the generation in force
        drafts, else the first head: never one that nothing was shown of, such as a candidate whose
        trial was broken off."""
        assert self._engine is not None
        wanted, before = view.in_force if view.pinned is None else view.pinned, self.generation
        for number in (wanted, view.in_force, STARTED_WITH):
            if await self._load(view, number):
                break
        if self.generation != before:
            await self._engine.drop_head()
        if self.generation == wanted:
            self._tell(None)
        else:
            self._tell(
                f"generation {wanted} cannot be loaded, generation {self.generation} drafts: "
                f"{self._refused[wanted]}"
            )

    async def _advance(self, view: _View) -> None:
        """Do what is next: follow the folder, begin a trial, or go on with one."""
        if self._unwritten is not None:
            with contextlib.suppress(OSError):  # the next time, then
                await self._keep_verdict()
                return  # the folder says something else now
        if view.pinned != self._followed_pin:
            self._followed_pin = view.pinned
            if view.pinned is not None:
                self._refused.pop(view.pinned, None)  # asked for: try again
        if view.pinned is not None and self.trial is not None:
            await self._break_off(view)
        if self.trial is None:
            await self._follow(view)
            candidate = view.candidate(self.generation)
            if view.pinned is None and candidate is not None and self._unwritten is None:
                self.trial = Trial(
                    candidate,
                    self.generation,
                    self._random,
                    self._plan,
                    has_replay=view.generations[candidate].replayed_against == self.generation,
                )
                logger.info("trial of generation %d against %d", candidate, self.generation)
                if candidate in self._refused:  # at once: it may have ended an engine
                    why = self._refused[candidate]
                    await self._end(view, self.trial, ROLLED_BACK, refused=why)
                    return
            if self.trial is None:
                return
        trial = self.trial
        if self.generation == trial.drafting and (state := self._now()) is not None:
            trial.observe(state)
            if (ended := trial.verdict()) is not None:
                verdict, by = ended
                await self._end(view, trial, verdict, by=by)
                return
        if self.generation != trial.drafting:
            if not await self._load(view, trial.drafting, log=logging.DEBUG):
                await self._give_up(view, trial, self._refused[trial.drafting])
            elif (state := self._now()) is not None:
                trial.begin(state)

    def _now(self) -> dict[str, Any] | None:
        assert self._engine is not None
        return self._engine.latest()

    async def _give_up(self, view: _View, trial: Trial, why: str) -> None:
        """End a trial of which a head cannot be loaded any more."""
        if trial.drafting == trial.candidate:
            await self._end(view, trial, ROLLED_BACK, refused=why)
        else:
            await self._break_off(view)

    async def _break_off(self, view: _View) -> None:
        """End the trial without a verdict: what the folder says drafts, and no other head stays."""
        assert self._engine is not None
        self.trial = None
        await self._follow(view)
        await self._engine.drop_head()

    async def _end(self, view: _View, trial: Trial, verdict: str, **reason: str) -> None:
        """Put the head in force that the verdict says, and keep what was seen. `reason` is `by`,
        what the verdict rests on, or `refused`, why the candidate cannot be loaded."""
        assert self._engine is not None
        self.trial = None
        record = {"verdict": verdict, **reason, **trial.figures()}
        label = "kept_by_replay" if reason.get("by") == REPLAY else verdict.replace(" ", "_")
        metrics.HEAD_TRIALS.labels(label).inc()
        logger.info("draft head: generation %d was %s: %s", trial.candidate, verdict, record)
        self._unwritten = (trial.candidate, verdict, record)
        try:
            await self._keep_verdict()
        except OSError as error:
            logger.error("the trial's verdict cannot be kept on disk yet: %s", error)
        else:  # without it the next start would know nothing of a head that drafts now
            await self._load(view, trial.candidate if verdict == KEPT else trial.incumbent)
        await self._engine.drop_head()

    async def _keep_verdict(self) -> None:
        """Keep what ended a trial on disk. Raises OSError; then it is still to be kept. Where the
        generation has been removed there is nothing to keep."""
        assert self._unwritten is not None
        with contextlib.suppress(KeyError):
            await asyncio.to_thread(self._keep, *self._unwritten)
        self._unwritten = None

    def _keep(self, candidate: int, verdict: str, record: dict[str, Any]) -> None:
        self._known = None
        self._lineage.generation(candidate)  # which may have been removed
        if verdict == KEPT:  # first: what drafts matters more than what is said of it
            self._lineage.put_in_force(candidate)
        self._lineage.record_trial(candidate, record)

    async def _load(self, view: _View, number: int, *, log: int = logging.INFO) -> bool:
        """Put a generation in force in the engine; returns whether it is. The reason why not is in
        `_refused`, and it is not tried again in this engine."""
        assert self._engine is not None
        if number == self.generation:
            return True
        if number in self._refused:
            return False
        try:
            folder = await asyncio.to_thread(view.folder, number)
        except KeyError:
            self._refused[number] = "there is no such generation, or its weights are gone"
            return False
        if self._loading is None:  # else the engine is dying of another one
            self._loading = number
        await self._note_loading(self._loading)
        try:
            pause_s = await self._engine.swap_head(folder, number)
        except SwapError as error:
            await self._note_loading(None)
            self._loading = None
            metrics.HEAD_SWAPS.labels("refused").inc()
            # Whoever may look at figures need not know where the server's files are.
            reason = str(error).removeprefix(f"{folder}: ")
            self._refused[number] = reason.replace(folder, "its folder") if folder else reason
        else:
            await self._note_loading(None)
            self._loading = None
            self._loaded.add(number)
            metrics.HEAD_SWAPS.labels("done").inc()
            metrics.HEAD_SWAP_SECONDS.observe(pause_s)
            self._enter(number)
            logger.log(
                log, "draft head: generation %d drafts, swapped in %.0f ms", number, 1e3 * pause_s
            )
            return True
        return False

    async def _note_loading(self, number: int | None) -> None:
        """Keep on disk what is loaded, in case that this process ends of it; the first time alone:
        the exchanges of a trial read no file."""
        if self._loading not in self._loaded | {STARTED_WITH}:
            with contextlib.suppress(OSError):  # a full disk keeps no head from being loaded
                await asyncio.to_thread(self._lineage.note_loading, number)

    def _enter(self, number: int) -> None:
        self.generation = number
        metrics.HEAD_GENERATION.set(number)

    def _tell(self, problem: str | None) -> None:
        """Log a problem once."""
        if problem is not None and problem != self.problem:
            logger.warning("%s", problem)
        self.problem = problem
