"""Restart policy of the engine: how long to wait before a restart, and when to stop trying."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from app.errors import EngineLostError
from app.settings import SupervisionSettings


class RestartPolicy:
    """Exponential back-off with a limit on restarts within `restart_window_s` seconds of service.

    `clock` counts only seconds in which the engine was ready: starts that fail late are never
    forgotten.
    """

    def __init__(self, settings: SupervisionSettings, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._at: deque[float] = deque()

    def next_delay_s(self, cause: str) -> float:
        """Seconds to wait before the restart that `cause` calls for.

        This is `restart_backoff_s`, doubled for every other restart within the window. Raises
        EngineLostError if there were `max_restarts` of them.
        """
        settings, now = self._settings, self._clock()
        while self._at and now - self._at[0] > settings.restart_window_s:
            self._at.popleft()
        before = len(self._at)
        if before >= settings.max_restarts:
            often = (
                f" {before + 1} times within {settings.restart_window_s:g} s of service"
                if before
                else ""
            )
            raise EngineLostError(
                f"the engine ended{often} (max_restarts is {settings.max_restarts}), at last: "
                f"{cause}; the log above says more"
            )
        self._at.append(now)
        # A float's exponent is bounded, the number of restarts is not.
        wait = settings.restart_backoff_s * 2.0 ** min(before, 64)
        return min(wait, settings.restart_backoff_max_s)
