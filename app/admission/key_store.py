"""The API keys in force: read at the start, and again whenever the file's content changes."""

from __future__ import annotations

import asyncio
import logging
import stat
from pathlib import Path

from app.admission.tenants import Keyring, parse_in_force
from app.errors import SettingsError
from app.observability import metrics
from app.settings import AdmissionSettings

logger = logging.getLogger(__name__)

READ_POLLS, LEAST_READ_S = 3.0, 5.0  # a read may take so many polls, and so long in any case


class KeyStore:
    """The current Keyring. The file is read in a thread, never in a request.

    A file is accepted as a whole or not at all. One that is empty, torn, broken or gone leaves the
    keys in force as they are: no valid key is refused, and no revoked key comes back, since the
    keys in force are those of the newest valid file.
    """

    def __init__(self, settings: AdmissionSettings) -> None:
        self._path = Path(settings.keys_file) if settings.keys_file else None
        self._poll_s = settings.keys_poll_s
        self._text: str | None = None  # source of the keys in force
        self._rejected: str | None = None  # the last text that was not accepted
        self._problem = ""
        self._reading: asyncio.Future[str] | None = None  # a read that has not ended
        self.guarded = settings.guarded
        self.ring = Keyring()
        if self._path is not None:
            self._text = _read(self._path)
            self.ring = parse_in_force(self._text, str(self._path))
        elif settings.keys is not None:
            self.ring = parse_in_force(settings.keys, "keys")
        if self.guarded and not self.ring.keys:
            logger.warning("there is no API key: every request will be refused")

    @property
    def watched(self) -> bool:
        """Whether the keys come from a file that may change."""
        return self._path is not None

    @property
    def stale(self) -> bool:
        """Whether older keys than the file's are in force, because the file was not accepted."""
        return bool(self._problem)

    async def watch(self) -> None:
        """Poll the file until cancelled."""
        while True:
            await asyncio.sleep(self._poll_s)
            await self.refresh()

    async def refresh(self) -> None:
        """Accept the file if its content has changed.

        It is read each time: two writes within one tick of the file system's clock, or a copy
        that keeps times, leave no other trace.
        """
        assert self._path is not None
        try:
            text = await self._read_in_time(self._path)
        except SettingsError as error:
            self._report(error)
            return
        if text == self._rejected:
            return
        if text != self._text:
            try:
                ring = await asyncio.to_thread(parse_in_force, text, str(self._path))
            except Exception as error:  # whatever a file makes a parser raise, the file is bad
                self._rejected = text
                self._report(error)
                return
            self.ring, self._text = ring, text
            metrics.KEY_RELOADS.labels("done").inc()
            logger.info("keys read again: %d keys", len(ring.keys))
        self._rejected, self._problem = None, ""
        metrics.KEYS_FILE_STALE.set(0)

    async def _read_in_time(self, path: Path) -> str:
        """What the file holds. Raises SettingsError, also while a read hangs, as that of a network
        file system whose server is gone may: there is no second one beside it."""
        loop = asyncio.get_running_loop()
        if self._reading is None:
            self._reading = loop.run_in_executor(None, _read, path)
        timeout_s = max(LEAST_READ_S, READ_POLLS * self._poll_s)
        done, _ = await asyncio.wait({self._reading}, timeout=timeout_s)
        if not done:
            raise SettingsError("keys_file", f"{path}: reading it takes more than {timeout_s:g} s")
        reading, self._reading = self._reading, None
        return reading.result()

    def _report(self, error: Exception) -> None:
        """Log and count a problem with the file once, not at every poll."""
        problem = str(error) or type(error).__name__
        if problem == self._problem:
            return
        self._problem = problem
        metrics.KEY_RELOADS.labels("failed").inc()
        metrics.KEYS_FILE_STALE.set(1)
        expected = isinstance(error, SettingsError)
        logger.error(
            "the keys file is not accepted, the keys in force stay: %s",
            problem,
            exc_info=None if expected else error,
        )


def _read(path: Path) -> str:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise SettingsError("keys_file", f"{path}: not a regular file")
        return path.read_text("utf-8")
    except OSError as error:
        raise SettingsError("keys_file", f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingsError("keys_file", f"{path}: {error}") from None
