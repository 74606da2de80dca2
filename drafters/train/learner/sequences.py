"""Which captured sequences a candidate is trained on, and which it is judged by.

No tenant decides for the others: what a tenant gives grows with the square root of what it has, and
is half of a round at most while there are others.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from drafters.learning.captured import Captured

HELD_BACK = 8  # one prompt in so many is never trained on
_LEAST_ANSWER = 2  # tokens: the target writes the first one before anything is drafted


@dataclass(frozen=True, slots=True)
class Choice:
    """The sequences of a round, of each tenant the newest ones."""

    trained: list[Captured]
    held_back: list[Captured]
    left_out: Counter[str]  # reason -> sequences that nothing can be learned from
    until: float  # when the newest of all ended, those that are left out included


def choose(
    captured: Iterable[Captured], *, answer_tokens: int, vocabulary: int, max_length: int
) -> Choice:
    """Choose sequences with some `answer_tokens` tokens of answers to train on, and an eighth of
    that to hold back. `captured` is ascending by time; ids are below `vocabulary`, and prompts
    leave room for an answer in `max_length` tokens."""
    trained, held_back = _Newest(answer_tokens), _Newest(answer_tokens // HELD_BACK)
    left_out: Counter[str] = Counter()
    seen: set[bytes] = set()
    until = 0.0
    for sequence in captured:
        until = max(until, sequence.at)
        if reason := _unusable(sequence, vocabulary, max_length):
            left_out[reason] += 1
            continue
        content = _digest(sequence.prompt, sequence.answer)
        if content in seen:
            left_out["duplicate"] += 1
            continue
        seen.add(content)
        (held_back if is_held_back(sequence.prompt) else trained).add(sequence)
    return Choice(trained.of_all_tenants(), held_back.of_all_tenants(), left_out, until)


def is_held_back(prompt: Sequence[int]) -> bool:
    """Whether a prompt is never trained on: the same for equal prompts, in every round."""
    return _digest(prompt)[0] % HELD_BACK == 0


def shares(available: Mapping[str, int], budget: int) -> dict[str, int]:
    """How many of the tokens that each tenant has are used, `budget` in all at most.

    In proportion to the square roots of what tenants have. None gives more than it has, nor more
    than half of the budget while there are others.
    """
    most = budget if len(available) == 1 else budget // 2
    bounds = {tenant: min(tokens, most) for tenant, tokens in available.items()}
    given: dict[str, int] = {}
    while bounds:
        roots = {tenant: math.sqrt(available[tenant]) for tenant in bounds}
        part = (budget - sum(given.values())) / max(sum(roots.values()), 1.0)
        whole = [tenant for tenant, bound in bounds.items() if bound <= part * roots[tenant]]
        if not whole:
            return given | {tenant: int(part * root) for tenant, root in roots.items()}
        given |= {tenant: bounds.pop(tenant) for tenant in whole}
    return given


class _Newest:
    """The newest sequences of each tenant, as far as a budget of answer tokens may use them."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._available: Counter[str] = Counter()
        self._kept: defaultdict[str, deque[Captured]] = defaultdict(deque)
        self._tokens: Counter[str] = Counter()  # of those that are kept

    def add(self, sequence: Captured) -> None:
        tenant, kept = sequence.tenant, self._kept[sequence.tenant]
        kept.append(sequence)
        self._available[tenant] += len(sequence.answer)
        self._tokens[tenant] += len(sequence.answer)
        while len(kept) > 1 and self._tokens[tenant] - len(kept[0].answer) >= self._budget:
            self._tokens[tenant] -= len(kept.popleft().answer)

    def of_all_tenants(self) -> list[Captured]:
        found = []
        for tenant, share in sorted(shares(self._available, self._budget).items()):
            taken = 0
            for sequence in reversed(self._kept[tenant]):
                if taken >= share:
                    break
                found.append(sequence)
                taken += len(sequence.answer)
        return found


def _unusable(sequence: Captured, vocabulary: int, max_length: int) -> str | None:
    if len(sequence.answer) < _LEAST_ANSWER or not sequence.prompt:
        return "too short"
    if len(sequence.prompt) + _LEAST_ANSWER > max_length:
        return "too long"
    if max(max(sequence.prompt), max(sequence.answer)) >= vocabulary:
        return "unknown token"
    return None


def _digest(*parts: Sequence[int]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(array("I", part).tobytes())
    return digest.digest()
