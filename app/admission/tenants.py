"""Tenants, their limits, and the keys that belong to them: the keys file's content.

    # aerie keys checksum: sha256:...
    [tenants.search]
    requests_per_minute = 600
    tokens_per_minute = 200_000
    max_concurrent = 16
    max_k = 3
    models = ["aerie-embedded"]
    priority = 0
    learn = true

    [[keys]]
    id = "3f9c2a7d10b4"
    tenant = "search"
    sha256 = "..."
    admin = false

A limit that is left out does not exist. A key is 256 random bits, so one SHA-256 is enough:
a slow hash protects secrets that can be guessed, and would cost every request its time.
"""

from __future__ import annotations

import hashlib
import hmac
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.admission import checksum
from app.errors import SettingsError
from app.settings.admission import TENANT_NAME

NAME = rf"^{TENANT_NAME}$"
# Longer than any key of ours; hashing what a client sends costs no more than this.
MAX_KEY_LENGTH = 256


class Tenant(BaseModel):
    """A tenant: the owner of keys, with the limits that the keys share."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field("", pattern=NAME)
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    max_concurrent: int | None = Field(None, ge=1)
    max_k: int | None = Field(None, ge=0)
    models: tuple[str, ...] | None = Field(None, strict=False)
    # vLLM's sense: lower is earlier.
    priority: int = Field(0, ge=-100, le=100)
    learn: bool = True  # whether its sequences may be captured, where any are


class Key(BaseModel):
    """One hashed key. `id` is no secret: it names the key in lists and logs."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str = Field(pattern=NAME)
    tenant: str = Field(pattern=NAME)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    admin: bool = False
    created: datetime | None = None


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tenants: dict[str, dict[str, object]] = Field(default_factory=dict)
    keys: list[Key] = Field(default_factory=list)


@dataclass(frozen=True)
class Identity:
    """Who sent a request, by its key."""

    tenant: Tenant
    key: str = ""  # the key's id
    admin: bool = False


@dataclass(frozen=True)
class Keyring:
    """Every tenant and key of one keys file. Immutable: a changed file makes a new one."""

    tenants: Mapping[str, Tenant] = field(default_factory=lambda: MappingProxyType({}))
    keys: tuple[Key, ...] = ()
    _identities: Mapping[str, tuple[str, Identity]] = field(
        default_factory=lambda: MappingProxyType({})
    )

    def find(self, secret: bytes) -> Identity | None:
        """The owner of a key as a client sent it, None for anything unknown.

        The look-up is by hash: its time may reveal something about the hash of a guess, which does
        not help with the next guess. The comparison itself takes constant time.
        """
        if not 0 < len(secret) <= MAX_KEY_LENGTH:
            return None
        digest = digest_of(secret)
        stored, identity = self._identities.get(digest, ("", None))
        return identity if hmac.compare_digest(stored.encode(), digest.encode()) else None


def digest_of(secret: bytes) -> str:
    """Hash under which a key is stored."""
    return hashlib.sha256(secret).hexdigest()


def parse(text: str, source: str) -> Keyring:
    """Parse the keys file. Raises SettingsError naming the entry that is wrong."""
    checksum.verify(text, source)
    try:
        document = _Document.model_validate(tomllib.loads(text))
        tenants = {
            name: Tenant.model_validate({**limits, "name": name})
            for name, limits in document.tenants.items()
        }
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SettingsError("keys", f"{source}: {where}: {first['msg']}") from None
    except ValueError as error:
        raise SettingsError("keys", f"{source}: {error}") from None
    except RecursionError:
        raise SettingsError("keys", f"{source}: nested too deeply") from None
    identities: dict[str, tuple[str, Identity]] = {}
    ids: set[str] = set()
    for key in document.keys:
        if key.tenant not in tenants:
            raise SettingsError("keys", f"{source}: key {key.id}: there is no tenant {key.tenant}")
        if key.id in ids or key.sha256 in identities:
            raise SettingsError("keys", f"{source}: key {key.id} appears twice")
        ids.add(key.id)
        identity = Identity(tenants[key.tenant], key.id, key.admin)
        identities[key.sha256] = (key.sha256, identity)
    return Keyring(MappingProxyType(tenants), tuple(document.keys), MappingProxyType(identities))


def parse_in_force(text: str, source: str) -> Keyring:
    """Parse a keys file that is to be in force. Raises SettingsError also if it holds no key.

    A file without keys is accepted if it has a checksum: without one it may be what a full disk or
    a shell left of a longer file.
    """
    ring = parse(text, source)
    if not ring.keys and not checksum.has_checksum(text):
        raise SettingsError(
            "keys",
            f"{source}: holds no key: restore it from a copy, or make a key with "
            "`aerie keys create`, which is then the only one",
        )
    return ring
