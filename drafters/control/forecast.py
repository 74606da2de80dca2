"""What a step at each K takes and makes, from those that ran."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise, zip_longest

from drafters.control.acceptance import Acceptance
from drafters.control.offers import Offers
from drafters.control.policy import Load, Step
from drafters.control.price import Price
from drafters.control.table import STEADY, CostTable

VERIFYING = 0.5  # of what one more draft costs: saved where the drafter leaves it out
SETTLING_S = 0.1  # of plain steps after drafts: the processor is as slow as with them at first
READING = 0.2  # of a step's time: more prompts than that, and it tells little of the rest
_TELLING = 64  # skipped tokens from which on the time to catch up shows in a step
_RECENT = 256  # steps from which the share of prompts in all tokens is taken
_TOGETHER = 64  # first drafts; few beside what is remembered, so promises do without these


@dataclass(frozen=True, slots=True)
class Promise:
    """Of each K at one load: [k_max + 1] each."""

    load: Load
    seconds: list[float]  # of a steady step
    tokens: list[float]  # that it makes, over all requests
    rates: list[float]  # tokens per second of such steps
    goodput: list[float]  # and with the drafter's share of the prompts


class Forecast:
    """Costs, acceptance, and what prompts and the drafter's catching up add.

    `catch_up_tokens` are the most of a request that the drafter reads when it is switched on.
    `grows`: drafts grow with runs while K adapts (docs/decisions/0017).
    """

    def __init__(self, k_max: int, catch_up_tokens: int, *, grows: bool = False) -> None:
        self._k_max = k_max
        self._catch_up_tokens = catch_up_tokens
        self.costs = CostTable(k_max)
        self._acceptance, self._offers = Acceptance(k_max, grows=grows), Offers(k_max)
        self._grows = grows
        self._k = self._drafted_k = 0  # of the last step, and when `_verified` had been drafted
        self._verified: list[Step] = []  # that these two have not learned from yet
        self._drafts = self._learned = 0  # first ones of these steps, and of those before
        self.adapts = False  # whether doubted drafts are left out, and others grow with runs
        self.gap = 0.0  # tokens per request that the drafter has not seen
        self._plain_s = math.inf  # since drafts were made or verified
        self._prefill, self._catch_up = Price(), Price()
        self._entering = Price()  # of prompts into the drafter
        self._prompts = self._outputs = 0.0  # recent tokens

    @property
    def is_settled(self) -> bool:
        """Whether plain steps take what they take, and no longer what drafts made of them."""
        return self._plain_s >= SETTLING_S

    def learn(self, step: Step) -> None:
        """From a step that has run."""
        load = step.load
        if step.drafted and step.drafted[0]:
            if self._k != self._drafted_k:
                self._learn_drafts()
                self._drafted_k = self._k
            self._verified.append(step)
            self._drafts += step.drafted[0]
            if self._drafts >= min(_TOGETHER, self._learned):
                self._learn_drafts()
        self._k = step.k
        self._prompts += (load.prefill_tokens - self._prompts) / _RECENT
        self._outputs += (step.tokens - self._outputs) / _RECENT
        if load.requests:
            self._learn_cost(step)
        plain = load.draft_tokens == load.drafts(step.k) == 0
        self._plain_s = self._plain_s + step.seconds if plain else 0.0
        requests = max(1, load.requests)
        unseen = self.gap + (step.tokens + load.prefill_tokens) / requests
        longest = min(self._catch_up_tokens, load.context_tokens / requests + 1.0)
        self.gap = min(longest, unseen) if step.k == 0 else 0.0

    @property
    def acceptance(self) -> Acceptance:
        """By all steps so far."""
        self._learn_drafts()
        return self._acceptance

    @property
    def offers(self) -> Offers:
        """By all steps so far."""
        self._learn_drafts()
        return self._offers

    def _learn_drafts(self) -> None:
        """From several steps as from one, which takes a fraction of the time."""
        steps = self._verified
        if not steps:
            return
        drafted, accepted = _added(s.drafted for s in steps), _added(s.accepted for s in steps)
        runs = [run for s in steps for run in s.runs]
        # What grew says nothing of a larger K: it is in easy text.
        grew = self._drafted_k if self._grows and self.adapts else 0
        self._acceptance.observe(drafted, accepted, runs, grew)
        if free := [s for s in steps if s.doubted]:
            drafted, doubted = _added(s.drafted for s in free), _added(s.doubted for s in free)
            self._offers.observe(drafted[: grew or None], doubted[: grew or None])
        steps.clear()
        self._learned += self._drafts
        self._drafts = 0

    def _learn_cost(self, step: Step) -> None:
        prompts = step.load.prefill_tokens
        reading = self.reading(prompts, step.k)
        if prompts:
            self._learn_reading(step)
        if not prompts or 0.0 < reading <= READING * step.seconds:
            self._learn_decoding(step, step.seconds - reading)

    def _learn_reading(self, step: Step) -> None:
        """What its prompts took beside the rest, which is known by now."""
        load = step.load
        if not self.costs.measured:
            return
        k = min(self._k_max, _evenly(_asked(load), load.requests))
        expected = self.costs.seconds(load.requests, k, load.context_tokens, _beyond(load))
        # The drafter had about the same share of it as of the whole step.
        share, more = step.draft_seconds / step.seconds, step.seconds - expected
        self._prefill.observe(load.prefill_tokens, (1.0 - share) * more)
        if step.k and self._unseen(load) < _TELLING:
            self._entering.observe(load.prefill_tokens, share * more)

    def _learn_decoding(self, step: Step, seconds: float) -> None:
        """A steady step's `seconds`, or what of them the drafter's catching up took."""
        load, costs = step.load, self.costs
        asked, before = load.drafts(step.k), _asked(load)
        if abs(before - asked) <= STEADY * asked:
            if asked or self.is_settled:
                k = _evenly(asked, load.requests)
                costs.observe(load.requests, k, load.context_tokens, seconds, _beyond(load))
        elif load.draft_tokens == 0 and costs.measured:
            unseen = self._unseen(load)
            if unseen >= _TELLING:
                # Verifies nothing yet, so it looks cheaper by what verifying costs.
                steady = costs.seconds(load.requests, step.k, load.context_tokens)
                self._catch_up.observe(unseen, seconds - steady)

    def _unseen(self, load: Load) -> float:
        """Tokens that a drafter which is switched on now has to read first."""
        return load.drafts(1) * self.gap

    def promise(self, load: Load) -> Promise:
        """What each K promises."""
        seconds, tokens = self._seconds(load), self.tokens(load)
        if load.prefill_tokens and load.waiting:
            # More prompts follow, so drafts will be verified beside prompts. The device is busy
            # then: a draft costs what a prompt's token costs, at least.
            price = self._prefill.seconds
            seconds = [
                max(cost, seconds[0] + price * load.drafts(k)) for k, cost in enumerate(seconds)
            ]
        rates = [made / cost for made, cost in zip(tokens, seconds, strict=True)]
        # A drafter that drafts reads the prompts too, an output token's share with each.
        share = self._prompts / self._outputs if self._outputs else 0.0
        entering = share * self._entering.seconds
        goodput = [rates[0], *(1.0 / (1.0 / rate + entering) for rate in rates[1:])]
        return Promise(load, seconds, tokens, rates, goodput)

    def tokens(self, load: Load) -> list[float]:
        """Expected of a step, over all requests, after K drafts: [k_max + 1]."""
        each = self._acceptance.tokens()
        if not load.reach:
            return [load.requests * made for made in each]
        gains = (n * (b - a) for n, (a, b) in zip(load.reach, pairwise(each), strict=True))
        return list(accumulate(gains, initial=float(load.requests)))

    def _seconds(self, load: Load) -> list[float]:
        requests, context, beyond = load.requests, load.context_tokens, self._expected(load)
        if not load.reach:
            return self.costs.row(requests, context, beyond)
        # As of the K at which all would have as many drafts as these have together.
        found = [self.costs.seconds(requests, 0, context)]
        for k in range(1, self._k_max + 1):
            each = max(1.0, load.drafts(k) / requests)
            low = min(int(each), self._k_max - 1)
            fewer, more = (
                self.costs.seconds(requests, n, context, beyond[k]) for n in (low, low + 1)
            )
            found.append(fewer + (each - low) * (more - fewer))
        return found

    def _expected(self, load: Load) -> list[float]:
        """Drafts beyond K over all requests, by what they cost: [k_max + 1]."""
        beyond = [0.0] * (self._k_max + 1)
        if not self.adapts:
            return beyond
        if self._grows:
            beyond = [load.requests * more for more in self._acceptance.grown()]
        reach, survival = load.reach or (load.requests,) * self._k_max, self._offers.survival()
        doubts = (n * (1.0 - offered) for n, offered in zip(reach, survival, strict=True))
        left_out = accumulate(doubts, initial=0.0)
        return [more - VERIFYING * n for more, n in zip(beyond, left_out, strict=True)]

    def verified(self, load: Load) -> int:
        """The K whose drafts the step verifies, more or less: not all requests have any yet."""
        drafts = _asked(load)
        return min(range(self._k_max + 1), key=lambda k: abs(load.drafts(k) - drafts))

    def reading(self, prompts: int, k: int) -> float:
        """Seconds for so many prompt tokens, of the drafter as well unless `k` is 0."""
        return prompts * (self._prefill.seconds + (k > 0) * self._entering.seconds)

    def catching_up(self, load: Load, gap: float) -> float:
        """Seconds that the drafter's first pass takes longer if it is switched on now."""
        # Unknown: as for prompts, or at most the target's.
        price = self._catch_up.seconds or self._entering.seconds or self._prefill.seconds
        return price * load.drafts(1) * gap + self._entering.seconds * load.prefill_tokens

    def without_drafts(self, step: Step) -> float:
        """Seconds that the step's tokens would have taken at K = 0, its prompts read as well."""
        load = step.load
        drafting = step.k > 0 or load.draft_tokens > 0
        if not drafting or load.requests == 0 or not self.costs.measured:
            return step.seconds
        plain = self.costs.seconds(load.requests, 0, load.context_tokens)
        return plain * step.tokens / load.requests + self.reading(load.prefill_tokens, 0)


def _asked(load: Load) -> int:
    """Drafts that this step's drafter was asked for at K, whether it offered all or not."""
    return load.draft_tokens + load.doubted_tokens - load.grown_tokens


def _beyond(load: Load) -> float:
    """Of `_expected`, what it was."""
    return load.grown_tokens - VERIFYING * load.doubted_tokens


def _added(counts: Iterable[tuple[int, ...]]) -> list[int]:
    return list(map(sum, zip_longest(*counts, fillvalue=0)))


def _evenly(drafts: int, requests: int) -> int:
    """The K at which all requests together have about so many drafts."""
    return max(1, round(drafts / requests)) if drafts else 0
