"""An index of one text that finds where its end has occurred before: hash chains, as in LZ77.

A model that copies from its prompt, or from its own answer, goes on as the text did at the earlier
place (prompt lookup decoding, Saxena 2023). The index knows one text alone, that of one request.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

SHORTEST, LONGEST = 2, 16  # tokens of a match
CANDIDATES = 32  # earlier places that are compared with the end of the text
SMALLEST_TABLE = 1024  # entries
# Odd numbers near 2**32 over the golden ratio and two of its powers: multiplicative hashing.
_FACTORS = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_WORD = 0xFFFFFFFF


class TextMatch(NamedTuple):
    """An earlier place that ends with the same tokens as the text."""

    length: int  # tokens in common, SHORTEST to LONGEST
    position: int  # of the token that followed there


class TextIndex:
    """The tokens of a text, and for each of its bigrams and trigrams the places that end with it.

    A place is the position of the token behind an n-gram, so that 0 stands for none. Of the n-grams
    with the same hash `newest` has the newest place, and `previous` by place the next older one.
    """

    def __init__(self, tokens: npt.NDArray[np.int32]) -> None:
        """Index `tokens`, [length]: 3 ms for 32,768 on the machine of docs/benchmarks.md."""
        self._tokens = array("i", np.ascontiguousarray(tokens, np.int32).tobytes())
        self._build()

    def __len__(self) -> int:
        """Number of tokens of the text."""
        return len(self._tokens)

    def __getitem__(self, position: int) -> int:
        """The token at a position."""
        return self._tokens[position]

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays: 20 to 28 for each token of a long text."""
        arrays = (self._tokens, *self._newest, *self._previous)
        return sum(entries.itemsize * len(entries) for entries in arrays)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens, each in about a microsecond. Where the text outgrows its tables, they are
        built anew at twice the size."""
        text, shift = self._tokens, self._shift
        (bigrams, trigrams), (older_bigrams, older_trigrams) = self._newest, self._previous
        for token in tokens:
            place = len(text)
            text.append(token)
            older_bigram = older_trigram = 0
            if place >= 2:
                near, far = text[place - 1] * _FACTORS[0], text[place - 2] * _FACTORS[1]
                slot = ((near + far) & _WORD) >> shift
                older_bigram, bigrams[slot] = bigrams[slot], place
                if place >= 3:
                    slot = ((near + far + text[place - 3] * _FACTORS[2]) & _WORD) >> shift
                    older_trigram, trigrams[slot] = trigrams[slot], place
            older_bigrams.append(older_bigram)
            older_trigrams.append(older_trigram)
        if len(text) > len(bigrams):
            self._build()

    def longest_match(self) -> TextMatch | None:
        """The newest of the longest matches among the CANDIDATES newest places that end with the
        same trigram as the text; else the newest place with the same bigram, if there is one."""
        text = self._tokens
        end = len(text)
        if end <= SHORTEST:
            return None
        (bigrams, trigrams), (older_bigrams, older_trigrams) = self._newest, self._previous
        near, far = text[-1] * _FACTORS[0], text[-2] * _FACTORS[1]
        slot = ((near + far + text[-3] * _FACTORS[2]) & _WORD) >> self._shift
        match = self._longest(trigrams[slot], older_trigrams, LONGEST)
        if match.length < SHORTEST:
            slot = ((near + far) & _WORD) >> self._shift
            match = self._longest(bigrams[slot], older_bigrams, SHORTEST)
        return match if match.length >= SHORTEST else None

    def _longest(self, place: int, older: array[int], enough: int) -> TextMatch:
        """The longest match of the places from `place` on, up to the first with `enough` tokens."""
        text, end = self._tokens, len(self._tokens)
        length, position = 0, 0
        for _ in range(CANDIDATES):
            if not place:
                break
            # It is longer than the best so far only if that has one more token in common.
            if length < place and text[place - 1 - length] == text[end - 1 - length]:
                common, most = 0, min(place, LONGEST)
                while common < most and text[place - 1 - common] == text[end - 1 - common]:
                    common += 1
                if common > length:
                    length, position = common, place
                    if length >= enough:
                        break
            place = older[place]
        return TextMatch(length, position)

    def following(self, position: int, count: int) -> list[int]:
        """`count` tokens from `position` on. Where that passes the end, the text repeats itself
        from there: a row of equal tokens goes on."""
        text, end = self._tokens, len(self._tokens)
        if position + count <= end:
            return text[position : position + count].tolist()
        repeated = text[position:end].tolist()
        return (repeated * (count // len(repeated) + 1))[:count]

    def _build(self) -> None:
        """Make the tables from the text, with an entry for each token or more."""
        count = len(self._tokens)
        size = max(SMALLEST_TABLE, 1 << (count - 1).bit_length())
        self._shift = 33 - size.bit_length()
        words = np.frombuffer(self._tokens, np.uint32) * np.array(_FACTORS, np.uint32)[:, None]
        # Modulo 2**32, by place from 2 and from 3 on: no place is behind the last token.
        pairs = words[0, 1:-1] + words[1, :-2]
        triples = pairs[1:] + words[2, :-3]
        chains = [_chains(hashes >> self._shift, size, count) for hashes in (pairs, triples)]
        self._newest = chains[0][0], chains[1][0]
        self._previous = chains[0][1], chains[1][1]


def _chains(slots: npt.NDArray[np.uint32], size: int, count: int) -> tuple[array[int], array[int]]:
    """Chains of the last places of a text of `count` tokens, of which `slots` are the hashes: the
    newest place by hash, [size], and the next older one by place, [count]."""
    newest, previous = np.zeros(size, np.int32), np.zeros(count, np.int32)
    first = count - len(slots)
    newest[slots] = np.arange(first, count)  # of equal slots the last one stays
    order = np.argsort(slots, kind="stable")
    same = slots[order[1:]] == slots[order[:-1]]
    previous[order[1:][same] + first] = order[:-1][same] + first
    return array("i", newest.tobytes()), array("i", previous.tobytes())
