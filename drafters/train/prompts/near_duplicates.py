"""Find near duplicates: texts whose word shingles have a Jaccard similarity above a threshold.

The search is exact, by prefix filtering (Chaudhuri et al. 2006, Bayardo et al. 2007). Sort the
shingles of every text in one order, rarest first. Two sets of similarity t or more then share a
shingle among the first n - ceil(t n) + 1 of each, n being the size of the set. Only these
prefixes are indexed; as they have the rarest shingles, few candidates must be compared.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import defaultdict
from collections.abc import Mapping

SHINGLE_WORDS = 3
_WORD = re.compile(r"\w+|[^\w\s]")


def shingles(text: str) -> frozenset[int]:
    """Checksums of all sequences of three words or signs, case folded; a shorter text has one."""
    words = _WORD.findall(text.casefold())
    last = max(len(words) - SHINGLE_WORDS, 0)
    return frozenset(
        zlib.crc32(" ".join(words[start : start + SHINGLE_WORDS]).encode(errors="replace"))
        for start in range(last + 1)
    )


class NearDuplicateIndex:
    """Sets of shingles, searched for one that is similar to a given set."""

    def __init__(self, threshold: float, frequency: Mapping[int, int]) -> None:
        """`frequency` of shingles orders them. It decides the speed, never the result."""
        if not 0.0 < threshold <= 1.0:
            raise ValueError(f"a similarity threshold lies in (0, 1], got {threshold}")
        self._threshold, self._frequency = threshold, frequency
        self._sets: list[frozenset[int]] = []
        self._by_shingle: defaultdict[int, list[int]] = defaultdict(list)  # positions in _sets

    def __contains__(self, candidate: frozenset[int]) -> bool:
        """Whether an added set has at least the threshold's similarity to `candidate`."""
        compared: set[int] = set()
        for shingle in self._prefix(candidate):
            for position in self._by_shingle.get(shingle, ()):
                if position in compared:
                    continue
                compared.add(position)
                other = self._sets[position]
                common = len(candidate & other)
                if common >= self._threshold * (len(candidate) + len(other) - common):
                    return True
        return False

    def add(self, added: frozenset[int]) -> None:
        """Add a set of shingles to those that later ones are compared with."""
        for shingle in self._prefix(added):
            self._by_shingle[shingle].append(len(self._sets))
        self._sets.append(added)

    def _prefix(self, members: frozenset[int]) -> list[int]:
        # Less 1e-9: rounding to just above an integer must not shorten the prefix.
        required = math.ceil(self._threshold * len(members) - 1e-9)
        order = sorted(members, key=lambda shingle: (self._frequency.get(shingle, 0), shingle))
        return order[: len(members) - required + 1]
