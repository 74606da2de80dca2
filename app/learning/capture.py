"""Takes sequences from the event loop, and has a thread write them."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable

from app.learning.captured_files import CapturedFiles
from app.observability import metrics
from drafters.learning.captured import Captured
from drafters.learning.lineage import STARTED_WITH

logger = logging.getLogger(__name__)

# Sequences that wait for the thread, in tokens: about 40 bytes each, as Python's integers. A tenant
# may have half of it, so that a flood of its sequences leaves room for others'.
QUEUED_TOKENS, TENANT_TOKENS = 500_000, 250_000
TICK_S = 0.2  # how often the thread looks for sequences: waking it for each would cost the loop
SHARE = 0.01  # of the time, that the thread may compute: Python runs one thread at a time
LEAST_REST_S = 0.005  # it rests for shorter times together
BATCH_BYTES = 256 * 1024  # written at once, at most
TIDY_S = 60.0  # how often files are looked at that may be too old, or an excluded tenant's
RETRY_S = 60.0  # how long nothing is captured after an error of the file system
CLOSE_S = 5.0  # how long the end waits for a file system that does not answer


class Capture:
    """Captures sequences: `offer` is called on the event loop and takes microseconds.

    `generation` returns the number of the head in force, which is entered with each sequence.
    """

    def __init__(self, files: CapturedFiles, steady: Callable[[], float] = time.monotonic) -> None:
        self.generation: Callable[[], int] = lambda: STARTED_WITH
        self._files = files
        self._steady = steady
        self._queue: deque[Captured] = deque()
        # Tokens by tenant. One thread writes each, so that neither needs a lock.
        self._offered: Counter[str] = Counter()  # the event loop's
        self._taken: Counter[str] = Counter()  # the thread's
        self._offered_tokens = 0
        self._taken_tokens = 0
        self._refusing = False  # after an error, until the next try
        self._failing = False  # after an error, until something was written
        self._retry_at = -math.inf
        self._tidy_at = -math.inf
        self._rested_at = 0.0  # seconds that the thread had computed by then
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aerie-capture", daemon=True)

    def offer(self, sequence: Captured) -> None:
        """Have a sequence written, or count it as dropped. Never waits."""
        tenant, tokens = sequence.tenant, len(sequence.prompt) + len(sequence.answer)
        queued = self._offered_tokens - self._taken_tokens
        of_tenant = self._offered[tenant] - self._taken[tenant]
        # One that is longer than all that may wait is taken where nothing waits.
        if self._refusing:
            metrics.LEARNING_DROPPED.labels("stopped").inc()
        elif (queued and queued + tokens > QUEUED_TOKENS) or (
            of_tenant and of_tenant + tokens > TENANT_TOKENS
        ):
            metrics.LEARNING_DROPPED.labels("queue").inc()
        else:
            self._offered_tokens += tokens
            self._offered[tenant] += tokens
            self._queue.append(sequence)

    def start(self) -> None:
        """Start the thread that writes."""
        self._thread.start()

    def close(self) -> None:
        """Write what waits, and end the thread. Blocks for CLOSE_S at most."""
        self._closing.set()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while not self._closing.wait(TICK_S):
            self._work()
        self._work()

    def _work(self) -> None:
        """Delete what may not be kept and write what waits. Errors stop both for RETRY_S."""
        # The tick before was a rest, too. What each idle tick computes would add up otherwise, and
        # the first sequence after a quiet night would wait for an hour.
        self._rested_at = time.thread_time()
        if self._refusing and self._steady() < self._retry_at:
            self._take_all_as_dropped()
            return
        self._refusing = False
        try:
            if self._is_tidy_due():
                self._files.tidy()
                self._tidy_at = self._steady() + TIDY_S
                self._rest()
            self._write_queued()
        except Exception as error:  # whatever it is, it is worth no request
            self._stop(error)
        metrics.LEARNING_BYTES.set(self._files.total_bytes)

    def _is_tidy_due(self) -> bool:
        return self._steady() >= self._tidy_at

    def _stop(self, error: Exception) -> None:
        if not self._failing:
            expected = isinstance(error, OSError)
            logger.error(
                "nothing is captured for %.0f s, and then it is tried again: %s",
                RETRY_S,
                error,
                exc_info=None if expected else error,
            )
        self._refusing = self._failing = True
        self._retry_at = self._steady() + RETRY_S
        metrics.LEARNING_STOPPED.set(1)
        self._take_all_as_dropped()

    def _take_all_as_dropped(self) -> None:
        while self._queue:
            self._take()
            metrics.LEARNING_DROPPED.labels("stopped").inc()

    def _take(self) -> Captured:
        sequence = self._queue.popleft()
        tokens = len(sequence.prompt) + len(sequence.answer)
        self._taken[sequence.tenant] += tokens
        self._taken_tokens += tokens
        return sequence

    def _write_queued(self) -> None:
        """Write what waits, until it is time to tidy: under load something waits always."""
        while self._queue and not self._is_tidy_due():
            batch: defaultdict[str, list[tuple[bytes, int]]] = defaultdict(list)
            size = 0
            while self._queue and size < BATCH_BYTES and not self._is_tidy_due():
                sequence = self._take()
                line = sequence.line()
                batch[sequence.tenant].append((line, len(sequence.answer)))
                size += len(line)
                self._rest()
            self._write(batch)
            self._rest()

    def _write(self, batch: dict[str, list[tuple[bytes, int]]]) -> None:
        """Write the lines of each tenant, and count them and the tokens of their answers."""
        while batch:
            tenant, lines = batch.popitem()
            try:
                self._files.append(tenant, b"".join(line for line, _ in lines))
            except OSError:
                lost = len(lines) + sum(map(len, batch.values()))
                metrics.LEARNING_DROPPED.labels("stopped").inc(lost)
                raise
            metrics.LEARNING_SEQUENCES.inc(len(lines))
            metrics.LEARNING_TOKENS.inc(sum(tokens for _, tokens in lines))
            if self._failing:
                self._failing = False
                metrics.LEARNING_STOPPED.set(0)
                logger.info("sequences are captured again")

    def _rest(self) -> None:
        """Sleep as long as SHARE asks for, for what the thread has computed since the last time."""
        rest_s = (time.thread_time() - self._rested_at) * (1 / SHARE - 1)
        if rest_s >= LEAST_REST_S and not self._closing.wait(rest_s):
            self._rested_at = time.thread_time()
