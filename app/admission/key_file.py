"""Changes to the keys file: create a key, revoke one, renew the checksum.

Comments and the order of entries survive.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import tomlkit
from tomlkit.exceptions import TOMLKitError

from app.admission.checksum import has_checksum, with_checksum, without_checksum
from app.admission.tenants import Tenant, digest_of, parse, parse_in_force
from app.errors import SettingsError

PREFIX = "sk-aerie-"
RANDOM_BYTES = 32


def create(
    path: Path, tenant: str, limits: Mapping[str, object], *, admin: bool, now: datetime
) -> tuple[str, str]:
    """Add a key, and its tenant if that is new.

    Returns the key's id and the key itself, which is stored nowhere. `limits` are a new tenant's;
    an existing one keeps its own.
    """
    secret = PREFIX + secrets.token_urlsafe(RANDOM_BYTES)
    key_id = secrets.token_hex(6)

    def change(document: tomlkit.TOMLDocument) -> None:
        tenants = document.setdefault("tenants", tomlkit.table(is_super_table=True))
        if tenant not in tenants:
            Tenant.model_validate({**limits, "name": tenant})
            tenants[tenant] = dict(limits)
        elif limits:
            raise SettingsError(
                "tenant",
                f"{tenant} exists: change its limits in {path}, then run `aerie keys checksum`",
            )
        entry = tomlkit.table()
        entry.update({"id": key_id, "tenant": tenant, "sha256": digest_of(secret.encode())})
        entry.update({"admin": admin, "created": now.astimezone(UTC).replace(microsecond=0)})
        document.setdefault("keys", tomlkit.aot()).append(entry)

    _edit(path, change)
    return key_id, secret


def revoke(path: Path, key_id: str) -> None:
    """Remove a key. Raises SettingsError if there is none with this id."""

    def change(document: tomlkit.TOMLDocument) -> None:
        keys = document.get("keys", [])
        for index, entry in enumerate(keys):
            if entry.get("id") == key_id:
                del keys[index]
                return
        raise SettingsError("id", f"{path} has no key {key_id}")

    _edit(path, change)


def renew_checksum(path: Path) -> None:
    """Write the checksum of what the file holds now. Raises SettingsError for a file that a
    gateway could not read, and for one that has neither a key nor a checksum: with a checksum an
    emptied file would revoke every key."""
    with _locked(path) as file:
        text = file.read_text("utf-8")
        if not has_checksum(text):
            parse_in_force(text, str(path))
        _write(file, without_checksum(text))


def _edit(path: Path, change: Callable[[tomlkit.TOMLDocument], None]) -> None:
    """Change the file as a whole or not at all, one writer at a time."""
    with _locked(path) as file:
        text = file.read_text("utf-8") if file.exists() else ""
        parse(text, str(path))
        try:
            document = tomlkit.parse(without_checksum(text))
            change(document)
            changed = tomlkit.dumps(document)
        except TOMLKitError as error:
            raise SettingsError("keys_file", f"{path}: {error}") from None
        except ValueError as error:
            raise SettingsError("keys_file", str(error)) from None
        _write(file, changed)


def _write(path: Path, content: str) -> None:
    """Replace the file, which keeps its owner and mode; what was written is on the disk when this
    returns."""
    text = with_checksum(content)
    parse(text, str(path))  # what a gateway could not read is never written
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            if path.exists():
                _give_owner_of(path, descriptor)
                os.fchmod(descriptor, path.stat().st_mode & 0o777)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # or a revoked key is back after a power cut
    finally:
        os.close(folder)


def _give_owner_of(path: Path, descriptor: int) -> None:
    """Give an open file the owner and group of the file at `path`, whose reader is the gateway.

    Raises SettingsError where this user may not.
    """
    old, new = path.stat(), os.fstat(descriptor)
    if (new.st_uid, new.st_gid) == (old.st_uid, old.st_gid):
        return
    try:
        os.fchown(descriptor, old.st_uid, old.st_gid)
    except OSError as error:
        problem = f"{path}: cannot keep its owner {old.st_uid}:{old.st_gid}: {error.strerror}"
        raise SettingsError("keys_file", f"{problem}; change it as that user or as root") from None


@contextmanager
def _locked(path: Path) -> Iterator[Path]:
    """Hold the keys file's lock; yields the file itself, where `path` is a symbolic link to it.

    The lock has its own file, since the keys file is replaced.
    """
    file = Path(os.path.realpath(path))
    # A link in the lock's place would have root empty another file, and give it away.
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
    try:
        descriptor = os.open(file.with_name(f".{file.name}.lock"), flags, 0o600)
        with os.fdopen(descriptor, "w") as lock:
            if file.exists():
                _give_owner_of(file, descriptor)
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield file
    except OSError as error:
        raise SettingsError("keys_file", f"{path}: {error.strerror}") from None
