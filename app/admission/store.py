"""The keys in force: read at the start, and again whenever the file changes."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from app import metrics
from app.admission.tenants import Keyring, parse
from app.errors import SettingsError
from app.settings import AdmissionSettings

logger = logging.getLogger(__name__)

Stamp = tuple[int, int, int]


class KeyStore:
    """Holds the current Keyring. Reading happens in a thread, never in a request."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self._path = Path(settings.keys_file) if settings.keys_file else None
        self._poll_s = settings.keys_poll_s
        self._stamp: Stamp | None = None
        self.guarded = settings.guarded
        self.ring = Keyring()
        if self._path is not None:
            self._stamp, self.ring = _read(self._path)
        elif settings.keys is not None:
            self.ring = parse(settings.keys, "keys")
        if self.guarded and not self.ring.keys:
            logger.warning("there is no API key yet: every request will be refused")

    async def watch(self) -> None:
        """Follow the file until cancelled. A file that is broken or gone changes nothing but
        the log: the keys that were in force stay so."""
        if self._path is None:
            return
        complaint = ""
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                if await asyncio.to_thread(_stamp, self._path) == self._stamp:
                    continue
                self._stamp, self.ring = await asyncio.to_thread(_read, self._path)
            except SettingsError as error:
                if complaint != str(error):
                    complaint = str(error)
                    metrics.KEY_RELOADS.labels("failed").inc()
                    logger.error("the keys in force stay as they were: %s", error)
                continue
            complaint = ""
            metrics.KEY_RELOADS.labels("done").inc()
            logger.info("keys read again: %d keys", len(self.ring.keys))


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError as error:
        raise SettingsError("keys_file", f"{path}: {error.strerror}") from None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> tuple[Stamp, Keyring]:
    """The stamp is taken first: a change while reading is then noticed at the next look."""
    stamp = _stamp(path)
    try:
        return stamp, parse(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError("keys_file", f"{path}: {error}") from None
