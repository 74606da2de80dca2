"""All that the gateway does so that its head learns, and its life from start to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from app.background import BackgroundTask
from app.learning.capture import Capture
from app.learning.captured_files import CapturedFiles
from app.learning.folder import ClaimedFolder
from app.learning.learner_process import LearnerProcess, learner_command
from app.learning.load_report import LoadReport
from app.settings import Settings
from drafters.learning.load_signal import LoadSignal

DAY_S = 86_400.0


class Learning:
    """Capture, the report of the load, and the learner (None where it runs elsewhere)."""

    def __init__(
        self, folder: str, settings: Settings, excluded: Callable[[], Collection[str]]
    ) -> None:
        """Claim the folder. Raises SettingsError if it cannot be used.

        `excluded` returns the tenants of whom nothing may be kept; another thread calls it.
        """
        learning = settings.learning
        self.folder = ClaimedFolder(folder)
        budget, keep_s = int(learning.learn_mib * 2**20), learning.learn_days * DAY_S
        self.capture = Capture(CapturedFiles(self.folder.captured, budget, keep_s, excluded))
        self.load = LoadReport(LoadSignal(self.folder.path))
        self.learner: LearnerProcess | None = None
        if learning.learn_train:
            target, head = settings.model, settings.speculation.drafter
            assert head is not None  # app/settings/sources.py
            command = partial(
                learner_command,
                self.folder.path,
                target.model,
                target.revision,
                head,
                settings.speculation.k,
                learning.learn_share,
                learning.learn_max_length,
                learning.learn_device,
            )
            self.learner = LearnerProcess(command)

    @property
    def background(self) -> tuple[BackgroundTask, ...]:
        """The task that keeps the learner running, where one runs here."""
        return () if self.learner is None else (self.learner.background,)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Run all of it meanwhile."""
        async with AsyncExitStack() as stack:
            stack.callback(self.folder.close)
            self.capture.start()
            stack.push_async_callback(asyncio.to_thread, self.capture.close)
            self.load.start()
            stack.push_async_callback(asyncio.to_thread, self.load.close)
            if self.learner is not None:
                await stack.enter_async_context(self.learner)
            yield

    def start_learner(self) -> None:
        """Start the learner, unless it runs elsewhere."""
        if self.learner is not None:
            self.learner.start()
