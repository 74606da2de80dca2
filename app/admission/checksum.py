"""A checksum inside the keys file, so that a part of the file is never taken for the whole.

A file cut between two entries is well-formed, and so is one whose last number lost its zeros. The
checksum stands in a comment before the first key: whatever is left of a torn file either
contradicts it or holds no key. `aerie keys` writes it; a file without one is taken as it is.
"""

from __future__ import annotations

import hashlib
import hmac
import re

from app.errors import SettingsError

_PREFIX = "# aerie keys checksum:"
_LINE = re.compile(rf"^{re.escape(_PREFIX)}(.*)\n?", re.MULTILINE)


def with_checksum(text: str) -> str:
    """`text` with the line of its checksum in front, in place of an older one."""
    body = without_checksum(text)
    return f"{_PREFIX} {_digest(body)}\n{body}"


def without_checksum(text: str) -> str:
    """`text` without the line of a checksum."""
    return _LINE.sub("", text)


def has_checksum(text: str) -> bool:
    """Whether `text` has the line of a checksum."""
    return _LINE.search(text) is not None


def verify(text: str, source: str) -> None:
    """Raise SettingsError if `text` has a checksum that does not match the rest of it."""
    written = _LINE.findall(text)
    if not written:
        return
    expected = _digest(without_checksum(text))
    if len(written) > 1 or not hmac.compare_digest(written[0].strip().encode(), expected.encode()):
        raise SettingsError(
            "keys",
            f"{source}: the content does not match its checksum: it was written in part, or "
            "changed by hand (then look it through and run `aerie keys checksum`)",
        )


def _digest(body: str) -> str:
    """SHA-256 of `body`, whatever its line ends and without trailing whitespace."""
    digest = hashlib.sha256(body.replace("\r\n", "\n").rstrip().encode()).hexdigest()
    return f"sha256:{digest}"
