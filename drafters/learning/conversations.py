"""Which prompts are turns of one conversation: what follows them is much alike.

The prompt of a later turn begins with an earlier turn's prompt. Of that, the tokens with which a
chat template begins the answer do not count: in a later turn some templates write others there, and
leave reasoning out. What follows does not count either: an answer's end may be other tokens in the
next prompt. A conversation whose first messages are dropped as it grows is another one from there.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

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

    def of(self, prompt: Sequence[int]) -> bytes:
        """The conversation of a prompt: the digest of its first prompt, the same for equal
        prompts."""
        # Of each beginning of the prompt, from its first token on.
        hashes = list(accumulate(prompt, _hash, initial=0))[1:]
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


def digest(*parts: Sequence[int]) -> bytes:
    """What is the same for equal token ids in equal parts: 32 bytes."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(array("I", part).tobytes())
    return found.digest()


def _hash(before: int, token: int) -> int:
    return hash((before, token))
