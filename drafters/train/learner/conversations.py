"""Which prompts are turns of one conversation: what follows them is much alike.

The prompt of a later turn begins with an earlier turn's prompt. Of that, the tokens with which a
chat template begins the answer do not count: in a later turn some templates write others there, and
leave reasoning out. What follows does not count either: an answer's end may be other tokens in the
next prompt. A conversation whose first messages are dropped as it grows is another one from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from drafters.train.learner.digests import digest

# Tokens behind a prompt by which two conversations that begin with it are told apart.
_CONTINUATION = 32
# Conversations that go on from one prompt and count as one: a user may have several answers written
# anew. What more begin with is a greeting, or a template, and says nothing of them.
_MOST_CONTINUATIONS = 4
_LONGEST_MARK = 16  # tokens at a prompt's end among which the answer's mark is looked for


@dataclass(slots=True)
class _Prompt:
    conversation: bytes
    continuations: set[int] = field(default_factory=set)  # hashes of longer prompts' beginnings


class Conversations:
    """The conversations of prompts, each of which comes after those of its earlier turns."""

    def __init__(self, answer_mark: int | None = None) -> None:
        """`answer_mark` is the first of the tokens with which the chat template begins an
        answer."""
        self._mark = answer_mark
        self._prompts: dict[int, _Prompt] = {}  # by the hash of what counts of it
        self._random = np.random.default_rng(0)
        self._factors = np.empty(0, np.uint64)

    def of(self, prompt: Sequence[int]) -> bytes:
        """The conversation of a prompt: the digest of its first prompt, the same for equal
        prompts."""
        hashes = self._hashes(prompt)
        own = self._end(prompt)
        conversation = None
        for length in range(own, 0, -1):
            if (known := self._prompts.get(hashes[length - 1])) is None:
                continue
            if length == own:
                return known.conversation
            continuation = hashes[min(length + _CONTINUATION, len(prompt)) - 1]
            if continuation in known.continuations or (
                len(known.continuations) < _MOST_CONTINUATIONS
            ):
                known.continuations.add(continuation)
                conversation = known.conversation
            break
        conversation = conversation or digest(prompt)
        self._prompts[hashes[own - 1]] = _Prompt(conversation)
        return conversation

    def _end(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt the next turn's begins with."""
        for place in range(len(prompt) - 1, max(len(prompt) - _LONGEST_MARK, 1) - 1, -1):
            if prompt[place] == self._mark:
                return place
        return len(prompt)

    def _hashes(self, prompt: Sequence[int]) -> list[int]:
        """A hash of each beginning of a prompt, from its first token on."""
        if (missing := len(prompt) - len(self._factors)) > 0:
            more = self._random.integers(1 << 63, size=missing, dtype=np.uint64)
            self._factors = np.concatenate([self._factors, 2 * more + 1])
        tokens = np.asarray(prompt, np.uint64) + 1
        found: list[int] = np.cumsum(tokens * self._factors[: len(tokens)]).tolist()
        return found
