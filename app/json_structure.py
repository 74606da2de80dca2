"""How many values a JSON text holds and how deep it nests, before it is parsed; its integers.

Parsing holds Python's global lock from end to end, so a worker thread does not help: while it
parses, no stream moves. A text of 16 MiB made of `1,1,1,...` took 1.3 GB and seconds. Counting the
characters that separate values takes 0.3 ms per MiB and says what parsing will cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

# Integers of 64 bits: the engine's messages and xgrammar hold no others.
INTEGERS = range(-(2**63), 2**63)
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NO_BRACKETS = bytes(set(range(256)) - set(_STEPS))


@dataclass(frozen=True)
class Bounds:
    """Limits of a JSON text: its values (counted as commas and opening brackets), the lists and
    objects among them, and its nesting depth."""

    values: int
    containers: int
    depth: int


def exceeded(data: bytes, bounds: Bounds) -> str | None:
    """Which limit the JSON text exceeds: "values", "containers", "depth" or None.

    Exact for valid JSON. In an invalid text everything before its first error is counted correctly,
    and a parser reads no further.
    """
    if _surely_within(data, bounds):
        return None
    outside = _outside_of_strings(data, bounds.values)
    if outside is None or _separators(outside) > bounds.values:
        return "values"
    if _containers(outside) > bounds.containers:
        return "containers"
    brackets = outside.translate(None, _NO_BRACKETS)
    if max(accumulate(map(_STEPS.__getitem__, brackets)), default=0) > bounds.depth:
        return "depth"
    return None


def at_most(texts: list[str], values: int) -> bool:
    """Whether the JSON texts hold at most `values` values together."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    if sum(map(_separators, encoded)) <= values:
        return True
    for data in encoded:
        outside = _outside_of_strings(data, values)
        values -= values + 1 if outside is None else _separators(outside)
        if values < 0:
            return False
    return True


def _surely_within(data: bytes, bounds: Bounds) -> bool:
    """Whether the text keeps its bounds even if every separator in its strings were a real one."""
    return (
        _containers(data) <= min(bounds.depth, bounds.containers)
        and _separators(data) <= bounds.values
    )


def _outside_of_strings(data: bytes, values: int) -> bytes | None:
    """The text without its strings; None if it has more of them than `values` values can have."""
    # Without escapes, every quote begins or ends a string.
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in data else data
    # A value has at most two strings, its name and itself; the first value has no separator.
    if plain.count(b'"') > 4 * (values + 1):
        return None
    return b"".join(plain.split(b'"')[::2])


def _separators(data: bytes) -> int:
    return data.count(b",") + _containers(data)


def _containers(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")
