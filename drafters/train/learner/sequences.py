"""Which captured sequences a candidate is trained on, and which it is judged by.

No tenant decides for the others: what a tenant gives grows with the square root of what it has, and
is half of a round at most while there are others. What proves something is the number of answers:
of those that judge only the beginning is used, and each tenant has enough of them to be protected.

What judges is held back by its prompt. Where a few prompts are asked again and again, often none of
them would be held back: there the prompt and its answer decide. The next answers are to the same
prompts, so that this is what the candidate has to be good at.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from drafters.learning.captured import Captured

HELD_BACK = 8  # one prompt in so many is never trained on
JUDGED_TOKENS = 256  # of an answer that is held back: more answers tell more than longer ones
LEAST_OF_TENANT = 8  # answers that are held back of a tenant, for a verdict of its own
_LEAST_ANSWER = 2  # tokens: the target writes the first one before anything is drafted
# Prompts that are held back; with fewer the prompt and the answer decide. The interval of a replay
# of three prompts is widened 2.7 times, of four 1.9 times (drafters/small_samples.py).
_LEAST_PROMPTS = 4
# Answers that are held back, where there are as many: of all tenants together, and of each. A few
# more than a verdict needs, because the target may find some of them improbable.
_HELD_BACK_IN_ALL, _HELD_BACK_OF_TENANT = 32, LEAST_OF_TENANT + 2


@dataclass(frozen=True, slots=True)
class Choice:
    """The sequences of a round, of each tenant the newest ones, with their answers cut."""

    trained: list[Captured]
    held_back: list[Captured]
    left_out: Counter[str]  # reason -> sequences that nothing can be learned from
    until: float  # when the newest of all ended, those that are left out included
    by_answer: bool  # whether the answer too decided what is held back


def choose(
    captured: Iterable[Captured], *, answer_tokens: int, vocabulary: int, max_length: int
) -> Choice:
    """Choose sequences with some `answer_tokens` tokens of answers to train on, and an eighth of
    that to hold back, or more where that would be too few answers. `captured` is ascending by time;
    ids are below `vocabulary`, and prompts leave room for an answer in `max_length` tokens, at
    which answers are cut. Those that are held back are cut at JUDGED_TOKENS."""
    by_prompt, by_answer = _Split(answer_tokens), _Split(answer_tokens)
    left_out: Counter[str] = Counter()
    seen: set[bytes] = set()
    until = 0.0
    for sequence in captured:
        until = max(until, sequence.at)
        if reason := _unusable(sequence, vocabulary, max_length):
            left_out[reason] += 1
            continue
        answer = sequence.answer[: max_length - len(sequence.prompt)]
        content = _digest(sequence.prompt, answer)
        if content in seen:
            left_out["duplicate"] += 1
            continue
        seen.add(content)
        cut = replace(sequence, answer=answer)
        by_prompt.add(cut, judges=is_held_back(sequence.prompt))
        by_answer.add(cut, judges=_is_one_in_eight(content))
    trained, held_back = by_prompt.chosen()
    found = Choice(trained, held_back, left_out, until, by_answer=False)
    if count_prompts(held_back) < _LEAST_PROMPTS:
        trained, held_back = by_answer.chosen()
        if count_prompts(held_back) > count_prompts(found.held_back):
            return Choice(trained, held_back, left_out, until, by_answer=True)
    return found


def is_held_back(prompt: Sequence[int]) -> bool:
    """Whether a prompt is held back where there are many prompts: the same for equal prompts, in
    every round."""
    return _is_one_in_eight(_digest(prompt))


def _is_one_in_eight(digest: bytes) -> bool:
    return digest[0] % HELD_BACK == 0


def count_prompts(sequences: Iterable[Captured]) -> int:
    """How many different prompts sequences have."""
    return len({tuple(sequence.prompt) for sequence in sequences})


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


class _Split:
    """The newest sequences to train on, and others to judge by."""

    def __init__(self, answer_tokens: int) -> None:
        self._trained = _Newest(answer_tokens)
        self._held_back = _Newest(answer_tokens // HELD_BACK, judges=True)

    def add(self, sequence: Captured, *, judges: bool) -> None:
        if judges:
            self._held_back.add(replace(sequence, answer=sequence.answer[:JUDGED_TOKENS]))
        else:
            self._trained.add(sequence)

    def chosen(self) -> tuple[list[Captured], list[Captured]]:
        """Those to train on, and those that are held back."""
        return self._trained.of_all_tenants(), self._held_back.of_all_tenants()


class _Newest:
    """The newest sequences of each tenant, as far as a budget of answer tokens may use them.

    Of those by which a candidate is judged (`judges`) each tenant gives a number of answers at
    least, whatever the budget.
    """

    def __init__(self, budget: int, judges: bool = False) -> None:
        self._budget = budget
        self._judges = judges
        self._available: Counter[str] = Counter()
        self._kept: defaultdict[str, deque[Captured]] = defaultdict(deque)
        self._tokens: Counter[str] = Counter()  # of those that are kept

    def add(self, sequence: Captured) -> None:
        tenant, kept = sequence.tenant, self._kept[sequence.tenant]
        kept.append(sequence)
        self._available[tenant] += len(sequence.answer)
        self._tokens[tenant] += len(sequence.answer)
        most = max(self._least(tenants=1), 1)  # of which the number of tenants may leave fewer
        while len(kept) > most and self._tokens[tenant] - len(kept[0].answer) >= self._budget:
            self._tokens[tenant] -= len(kept.popleft().answer)

    def _least(self, tenants: int) -> int:
        """How many answers each of so many tenants gives, if it has them."""
        return max(_HELD_BACK_IN_ALL // tenants, _HELD_BACK_OF_TENANT) if self._judges else 0

    def of_all_tenants(self) -> list[Captured]:
        found = []
        least = self._least(len(self._available) or 1)
        for tenant, share in sorted(shares(self._available, self._budget).items()):
            tokens = 0
            for number, sequence in enumerate(reversed(self._kept[tenant])):
                if tokens >= share and number >= least:
                    break
                found.append(sequence)
                tokens += len(sequence.answer)
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
