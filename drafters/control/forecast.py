"""What a step at each K takes and makes, from those that ran."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

from drafters.control.acceptance import Acceptance
from drafters.control.offers import Offers
from drafters.control.policy import Load, Step
from drafters.control.price import Price
from drafters.control.table import STEADY, CostTable

DRAFTING = 0.3  # of what a draft costs is the drafter's, and is paid for one it leaves out
SETTLING_S = 0.1  # of plain steps after drafts: the processor is as slow as with them at first
_TELLING = 64  # skipped tokens from which on the time to catch up shows in a step
_RECENT = 256  # steps from which the share of prompts in all tokens is taken


@dataclass(frozen=True, slots=True)
class Promise:
    """Of each K at one load: [k_max + 1] each."""

    load: Load
    alike: list[float]  # the K at which a step takes as long if all drafts are offered
    seconds: list[float]  # of a steady step
    tokens: list[float]  # that it makes, over all requests
    rates: list[float]  # tokens per second of such steps
    goodput: list[float]  # and with the drafter's share of the prompts


class Forecast:
    """Costs, acceptance, and what prompts and the drafter's catching up add.

    `catch_up_tokens` are the most of a request that the drafter reads when it is switched on.
    """

    def __init__(self, k_max: int, catch_up_tokens: int) -> None:
        self._k_max = k_max
        self._catch_up_tokens = catch_up_tokens
        self.costs = CostTable(k_max)
        self.acceptance = Acceptance(k_max)
        self.offers = Offers(k_max)
        self.doubts = False  # whether drafts that the drafter doubts are left out
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
        self.acceptance.observe(step.drafted, step.accepted, step.runs)
        self.offers.observe(step.drafted, step.doubted)
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

    def _learn_cost(self, step: Step) -> None:
        load, requests, costs = step.load, step.load.requests, self.costs
        asked, before = load.drafts(step.k), load.draft_tokens + load.doubted_tokens
        unseen = load.drafts(1) * self.gap
        if load.prefill_tokens:
            if costs.measured:
                k = min(self._k_max, _evenly(_worth(before, load.draft_tokens), requests))
                expected = costs.seconds(requests, k, load.context_tokens)
                # The drafter had about the same share of it as of the whole step.
                share, more = step.draft_seconds / step.seconds, step.seconds - expected
                self._prefill.observe(load.prefill_tokens, (1.0 - share) * more)
                if step.k and unseen < _TELLING:
                    self._entering.observe(load.prefill_tokens, share * more)
        elif abs(before - asked) <= STEADY * asked:
            if asked or self.is_settled:
                k = _evenly(_worth(asked, asked - load.doubted_tokens), requests)
                costs.observe(requests, k, load.context_tokens, step.seconds)
        elif load.draft_tokens == 0 and unseen >= _TELLING and costs.measured:
            # Verifies nothing yet, so the catching up looks cheaper by what verifying costs.
            steady = costs.seconds(requests, step.k, load.context_tokens)
            self._catch_up.observe(unseen, step.seconds - steady)

    def promise(self, load: Load) -> Promise:
        """What each K promises."""
        alike, tokens = self._alike(load), self.tokens(load)
        seconds = self._seconds(load, alike)
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
        return Promise(load, alike, seconds, tokens, rates, goodput)

    def tokens(self, load: Load) -> list[float]:
        """Expected of a step, over all requests, after K drafts: [k_max + 1]."""
        each = self.acceptance.tokens()
        if not load.reach:
            return [load.requests * made for made in each]
        gains = (n * (b - a) for n, (a, b) in zip(load.reach, pairwise(each), strict=True))
        return list(accumulate(gains, initial=float(load.requests)))

    def _seconds(self, load: Load, alike: Sequence[float]) -> list[float]:
        row = self.costs.row(load.requests, load.context_tokens)
        found = row[:1]
        for k in alike[1:]:
            low = min(int(k), self._k_max - 1)
            found.append(row[low] + (k - low) * (row[low + 1] - row[low]))
        return found

    def _alike(self, load: Load) -> list[float]:
        """As in a Promise: where all requests have as many drafts as these have together."""
        reach = load.reach or (load.requests,) * self._k_max
        offered = self.offers.survival() if self.doubts else [1.0] * self._k_max
        together = accumulate(map(_worth, reach, map(mul, reach, offered)))
        return [0.0, *(max(1.0, drafts / load.requests) for drafts in together)]

    def verified(self, load: Load) -> int:
        """The K whose drafts the step verifies, more or less: not all requests have any yet."""
        drafts = load.draft_tokens + load.doubted_tokens
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


def _worth(asked: float, offered: float) -> float:
    """How many drafts cost as much if all of them are offered."""
    return DRAFTING * asked + (1.0 - DRAFTING) * offered


def _evenly(drafts: float, requests: int) -> int:
    """The K at which all requests together have about so many drafts."""
    return max(1, round(drafts / requests)) if drafts else 0
