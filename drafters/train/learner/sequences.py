"""Which captured sequences a candidate is trained on, and which it is judged by.

No tenant decides for the others: what a tenant gives grows with the square root of what it has, and
is half of a round at most while there are others. What proves something is the number of answers:
of those that judge only the beginning is used, and each tenant has enough of them to be protected.

What judges is held back by its conversation: all turns of one, and all answers to a prompt, are on
one side. Where a tenant asks a few prompts again and again, often none of them would be held back,
or all: there the prompt and its answer decide. The next answers are to the same prompts, so that
this is what the candidate has to be good at. The next turns of a few long conversations are not.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from drafters.learning.captured import Captured
from drafters.learning.conversations import Conversations, digest

HELD_BACK = 8  # one conversation in so many is never trained on
JUDGED_TOKENS = 256  # of an answer that is held back: more answers tell more than longer ones
LEAST_OF_TENANT = 8  # answers that are held back of a tenant, for a verdict of its own
_LEAST_ANSWER = 2  # tokens: the target writes the first one before anything is drafted
# Conversations of a tenant that are held back, which are single prompts where nothing follows; with
# fewer the prompt and the answer decide. The interval of a replay of three is widened 2.7 times, of
# four 1.9 times (drafters/small_samples.py).
LEAST_PROMPTS = 4
# Different prompts in a conversation, on average, with which a tenant has conversations: the answer
# never decides what is held back of it.
_TURNS = 1.5
# Answers of one conversation that judge: more of them tell little, and others tell much.
_JUDGED_OF_CONVERSATION = 4
# Answers that are held back, where there are as many: of all tenants together, and of each. A few
# more than a verdict needs, because the target may find some of them improbable.
_HELD_BACK_IN_ALL, HELD_BACK_OF_TENANT = 32, LEAST_OF_TENANT + 2


@dataclass(frozen=True, slots=True)
class Choice:
    """The sequences of a round, of each tenant the newest ones, with their answers cut."""

    trained: list[Captured]
    held_back: list[Captured]
    conversations: list[int]  # of each that is held back: the same number for turns of one
    left_out: Counter[str]  # reason -> sequences that nothing can be learned from
    until: float  # when the newest of all ended, those that are left out included
    by_answer: frozenset[str]  # tenants of whom the answer too decided what is held back


def choose(
    captured: Iterable[Captured],
    *,
    answer_tokens: int,
    vocabulary: int,
    max_length: int,
    answer_mark: int | None = None,
) -> Choice:
    """Choose sequences with some `answer_tokens` tokens of answers to train on, and an eighth of
    that to hold back, or more where that would be too few answers. `captured` is ascending by time;
    ids are below `vocabulary`, and prompts leave room for an answer in `max_length` tokens, at
    which answers are cut. Those that are held back are cut at JUDGED_TOKENS. `answer_mark` is a
    token (drafters/learning/conversations.py)."""
    conversations = Conversations(answer_mark)
    tenants: dict[str, _Tenant] = {}
    left_out: Counter[str] = Counter()
    until = 0.0
    for sequence in captured:
        until = max(until, sequence.at)
        if reason := unusable(sequence, vocabulary, max_length):
            left_out[reason] += 1
            continue
        tenant = tenants.setdefault(sequence.tenant, _Tenant(answer_tokens))
        if not tenant.add(cut(sequence, max_length), conversations.of(sequence.prompt)):
            left_out["duplicate"] += 1

    def held_back(by_answer: Collection[str]) -> dict[str, dict[bytes, Captured]]:
        splits = {name: item.split(name in by_answer) for name, item in tenants.items()}
        sides = {name: split.held_back for name, split in splits.items()}
        return _newest(sides, answer_tokens // HELD_BACK, judges=True)

    def count(sequences: Mapping[bytes, Captured]) -> int:
        return len({conversations.of(item.prompt) for item in sequences.values()})

    by_prompt, by_answer = held_back(()), held_back(tenants)
    few = frozenset(
        name
        for name, item in tenants.items()
        if not item.converses
        and (prompts := count(by_prompt[name])) < LEAST_PROMPTS
        and count(by_answer[name]) >= max(prompts, 1)
    )
    judged = held_back(few)
    sides = {name: item.split(name in few).trained for name, item in tenants.items()}
    trained = _newest(sides, answer_tokens)
    # What is one tenant's to train on may be held back of another one.
    contents = {key for items in judged.values() for key in items}
    judges = [item for items in judged.values() for item in items.values()]
    numbers: dict[bytes, int] = {}
    return Choice(
        [item for items in trained.values() for key, item in items.items() if key not in contents],
        judges,
        [numbers.setdefault(conversations.of(item.prompt), len(numbers)) for item in judges],
        left_out,
        until,
        few,
    )


def is_held_back(prompt: Sequence[int]) -> bool:
    """Whether a prompt is held back where there are many prompts: the same for equal prompts, in
    every round."""
    return _is_one_in_eight(digest(prompt))


def _is_one_in_eight(found: bytes) -> bool:
    return found[0] % HELD_BACK == 0


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


class _Tenant:
    """A tenant's sequences, held back by their conversations, and by their prompts and answers."""

    def __init__(self, answer_tokens: int) -> None:
        self._by_prompt = _Split(answer_tokens)
        self._by_answer = _Split(answer_tokens)
        self._contents: set[bytes] = set()
        self._prompts: set[bytes] = set()
        self._conversations: set[bytes] = set()

    @property
    def converses(self) -> bool:
        """Whether there are different prompts in a conversation."""
        return len(self._prompts) >= _TURNS * len(self._conversations)

    def add(self, sequence: Captured, conversation: bytes) -> bool:
        """Add a sequence, in the place of an equal one before it; returns whether there was none.
        What is asked again and again is as new as its last answer."""
        key = content(sequence)
        is_new = key not in self._contents
        self._contents.add(key)
        self._prompts.add(digest(sequence.prompt))
        self._conversations.add(conversation)
        self._by_prompt.add(key, sequence, is_new, _is_one_in_eight(conversation), conversation)
        self._by_answer.add(key, sequence, is_new, _is_one_in_eight(key))
        return is_new

    def split(self, by_answer: bool) -> _Split:
        """What there is where the answer decides what is held back, or the conversation."""
        return self._by_answer if by_answer else self._by_prompt


class _Split:
    """A tenant's newest sequences to train on, and others to judge by."""

    def __init__(self, answer_tokens: int) -> None:
        self.trained = _Newest(answer_tokens)
        self.held_back = _Newest(answer_tokens // HELD_BACK, least=_least(tenants=1))
        self._judging: dict[bytes, OrderedDict[bytes, None]] = {}  # contents by conversation

    def add(
        self,
        key: bytes,
        sequence: Captured,
        is_new: bool,
        judges: bool,
        conversation: bytes | None = None,
    ) -> None:
        """Add a sequence. Of those that judge the newest few of a `conversation` are kept."""
        if not judges:
            self.trained.add(key, sequence, is_new)
            return
        sequence = replace(sequence, answer=sequence.answer[:JUDGED_TOKENS])
        self.held_back.add(key, sequence, is_new)
        if conversation is None:
            return
        keys = self._judging.setdefault(conversation, OrderedDict())
        keys.pop(key, None)
        keys[key] = None
        if len(keys) > _JUDGED_OF_CONVERSATION:
            self.held_back.drop(keys.popitem(last=False)[0])


class _Newest:
    """The newest sequences of a tenant, as far as a budget of answer tokens may use them, and
    `least` of them whatever the budget."""

    def __init__(self, budget: int, least: int = 0) -> None:
        self._budget = budget
        self._least = max(least, 1)
        self.available = 0  # tokens of answers, those beyond the budget included
        self._dropped: set[bytes] = set()  # contents that `available` leaves out
        self._kept: OrderedDict[bytes, Captured] = OrderedDict()  # by content
        self._tokens = 0  # of those that are kept

    def add(self, key: bytes, sequence: Captured, is_new: bool) -> None:
        tokens = len(sequence.answer)
        if is_new or key in self._dropped:
            self.available += tokens
            self._dropped.discard(key)
        if self._kept.pop(key, None) is not None:
            self._tokens -= tokens
        self._kept[key] = sequence
        self._tokens += tokens
        while len(self._kept) > self._least:
            oldest = next(iter(self._kept.values()))
            if self._tokens - len(oldest.answer) < self._budget:
                break
            self._kept.popitem(last=False)
            self._tokens -= len(oldest.answer)

    def drop(self, key: bytes) -> None:
        """Leave out a sequence, if it is kept, until it is added again."""
        if (dropped := self._kept.pop(key, None)) is not None:
            self._tokens -= len(dropped.answer)
            self.available -= len(dropped.answer)
            self._dropped.add(key)

    def take(self, tokens: int, least: int) -> dict[bytes, Captured]:
        """The newest ones with `tokens` tokens of answers, and `least` of them, if there are so
        many; by content."""
        found: dict[bytes, Captured] = {}
        total = 0
        for key, sequence in reversed(self._kept.items()):
            if total >= tokens and len(found) >= least:
                break
            found[key] = sequence
            total += len(sequence.answer)
        return found


def _newest(
    tenants: Mapping[str, _Newest], budget: int, judges: bool = False
) -> dict[str, dict[bytes, Captured]]:
    """What each tenant gives to `budget` tokens of answers. Of those by which a candidate is judged
    each gives a number of answers at least, whatever the budget."""
    available = {name: item.available for name, item in tenants.items() if item.available}
    given = shares(available, budget)
    least = _least(len(given) or 1) if judges else 0
    return {name: item.take(given.get(name, 0), least) for name, item in sorted(tenants.items())}


def _least(tenants: int) -> int:
    """How many answers are held back of each of so many tenants, if it has them."""
    return max(_HELD_BACK_IN_ALL // tenants, HELD_BACK_OF_TENANT)


def unusable(sequence: Captured, vocabulary: float, max_length: int) -> str | None:
    """Why nothing can be learned from a sequence; None if something can."""
    if len(sequence.answer) < _LEAST_ANSWER or not sequence.prompt:
        return "too short"
    if len(sequence.prompt) + _LEAST_ANSWER > max_length:
        return "too long"
    if max(max(sequence.prompt), max(sequence.answer)) >= vocabulary:
        return "unknown token"
    return None


def cut(sequence: Captured, max_length: int) -> Captured:
    """A sequence whose answer ends where it has `max_length` tokens with its prompt."""
    return replace(sequence, answer=sequence.answer[: max_length - len(sequence.prompt)])


def content(sequence: Captured) -> bytes:
    """What is the same for sequences with equal prompts and answers."""
    return digest(sequence.prompt, sequence.answer)
