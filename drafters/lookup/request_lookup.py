"""The lookups of one request: its text, the match at the text's end, and how matches went on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from drafters.control.policy import Match
from drafters.lookup.text_index import TextIndex, TextMatch


class RequestLookup:
    """A request's text and the longest match at its end.

    Every match is compared with the tokens that follow in the text, whether drafts were made of it
    or not. So it is known what lookups are worth also while none is drafted from.
    """

    def __init__(self, tokens: npt.NDArray[np.int32], most: int) -> None:
        """Begin with the request's `tokens`, [length]. A lookup drafts `most` tokens at most."""
        self._text = TextIndex(tokens)
        self._most = most
        self.match: TextMatch | None = self._text.longest_match()

    def __len__(self) -> int:
        """Number of tokens of the text."""
        return len(self._text)

    @property
    def newest(self) -> int:
        """The last token of the text."""
        return self._text[len(self._text) - 1]

    @property
    def nbytes(self) -> int:
        """Bytes of the text's index."""
        return self._text.nbytes

    def advance(self, tokens: Sequence[int]) -> Match | None:
        """Append the tokens of a step and find the match at the new end. Returns how the match at
        the old end went on, None if there was none."""
        old, text, end = self.match, self._text, len(self._text)
        text.extend(tokens)
        self.match = text.longest_match()
        if old is None:
            return None
        compared = min(len(tokens), self._most)
        equal = 0
        while equal < compared and text[end + equal] == text[old.position + equal]:
            equal += 1
        return Match(old.length, compared, equal)

    def draft(self, count: int) -> list[int]:
        """`count` tokens as they followed the earlier place of the match, which must exist."""
        assert self.match is not None
        return self._text.following(self.match.position, count)
