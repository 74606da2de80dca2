"""Tells the learner how many requests the gateway answers."""

from __future__ import annotations

import logging
import threading

from drafters.learning.load_signal import RENEWED_S, STARTING, LoadSignal

logger = logging.getLogger(__name__)

CLOSE_S = 2.0  # how long the end waits for a file system that does not answer


class LoadReport:
    """Writes the load from a thread of its own: a file system may take long where a disk is busy.

    It also says when the engine starts: what it measures then is measured alone.
    """

    def __init__(self, signal: LoadSignal) -> None:
        self._signal = signal
        self._sequences = 0
        self._serving = False
        self._changed = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="aerie-load", daemon=True)

    def count(self, sequences: int) -> None:
        """Say how many sequences the engine has. Takes less than a microsecond, and about two when
        the first one comes or the last one goes."""
        begins_or_ends = bool(sequences) != bool(self._sequences)
        self._sequences = sequences  # before the thread may look at it
        if begins_or_ends:
            self._changed.set()

    def serve(self, serving: bool) -> None:
        """Say whether the engine serves, or starts."""
        self._serving = serving
        self._sequences = 0  # an engine that died has none
        self._changed.set()

    @property
    def requests(self) -> int:
        """How many requests the learner is told of, or STARTING."""
        return self._sequences if self._serving else STARTING

    def start(self) -> None:
        """Start the thread that writes."""
        self._thread.start()

    def close(self) -> None:
        """End the thread. Blocks for CLOSE_S at most."""
        self._closing = True
        self._changed.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        failing = False
        while not self._closing:
            self._changed.clear()
            try:
                self._signal.write(self.requests)
                failing = False
            except OSError as error:  # the learner then waits
                if not failing:
                    logger.error("the load is not told to the learner: %s", error)
                failing = True
            self._changed.wait(RENEWED_S)
        self._signal.close()
