"""Requests that copy, and requests that do not, under a controller with a head and lookups."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.simulate.hardware import Hardware
from drafters.config import HEAD, LOOKUP
from drafters.control.controller import Controller
from drafters.control.objective import Objective
from drafters.control.policy import Load, Match, SourceCounts, Step, counts_above
from drafters.control.sources.draft_plan import Candidate, SourceChoice, choose_sources
from tests.drafters.control.engines import HUMANEVAL, SMOLLM2, calibration

K_MAX, LOOKUP_K, WINDOW = 5, 10, 256


@dataclass(frozen=True)
class Kind:
    """A kind of text: how often its end matches, and how often each token behind it is equal."""

    matches: Sequence[tuple[float, int, float]]  # (probability, tokens, acceptance of each token)


COPY = Kind(((0.05, 3, 0.6), (0.9, 16, 0.97)))
# In a trial, chat looked up 0.4 to 1.1 tokens a step, of which a third was right.
CHAT = Kind(((0.25, 2, 0.3), (0.1, 3, 0.4), (0.05, 5, 0.5)))


@dataclass
class Simulation:
    """Runs `kinds`, a request each, for ever; head drafts are accepted as HUMANEVAL's are."""

    kinds: Sequence[Kind]
    seed: int = 0
    sources: tuple[str, ...] | None = None
    hardware: Hardware = SMOLLM2
    noise: float = 0.03
    context: int = 500  # tokens of each request
    verifying_s: float = 0.0  # of attention, for each context token of a request with drafts
    tokens: float = 0.0  # expected, not drawn
    seconds: float = 0.0  # without noise
    passes: int = 0
    steps: int = 0
    controller: Controller = field(init=False)

    def __post_init__(self) -> None:
        self.controller = Controller(K_MAX, lookup_tokens=LOOKUP_K, catch_up_tokens=WINDOW)
        self.controller.load_calibration(calibration(self.hardware, K_MAX))
        self.controller.set_objective(Objective(sources=self.sources))

    def run(self, steps: int) -> None:
        """Run so many steps."""
        rng, count = random.Random(self.seed), len(self.kinds)
        candidates = [Candidate(LOOKUP_K) for _ in self.kinds]
        rates = [0.0] * count  # acceptance of each token behind the match
        pending = [(HEAD, 0)] * count
        context = self.context * count
        for _ in range(steps):
            drafts = sum(drafted for _, drafted in pending)
            k = self.controller.choose(Load(count, context_tokens=context, draft_tokens=drafts))
            plan = self.controller.plan()
            counts = {source: ([0] * 11, [0] * 11) for source in (HEAD, LOOKUP)}
            matches, made, fresh = [], 0, []
            for place, (source, drafted) in enumerate(pending):
                survival = HUMANEVAL
                if source == LOOKUP:
                    survival = tuple(rates[place] ** (i + 1) for i in range(drafted))
                draw = rng.random()
                right = sum(draw < share for share in survival[:drafted])
                if drafted:
                    counts[source][0][drafted] += 1
                    counts[source][1][right] += 1
                self.tokens += 1 + sum(survival[:drafted])
                made += 1 + right
                fresh.append(1 + right)
                length = candidates[place].match
                if plan is not None and length:
                    verified = right if source == LOOKUP else 0
                    failed = source == LOOKUP and right < drafted
                    matches.append(
                        self._match(rng, length, rates[place], 1 + right, verified, failed)
                    )
            for place, kind in enumerate(self.kinds):
                candidates[place].match, rates[place] = self._draw(rng, kind)
            if plan is None:
                choice = SourceChoice(k, (k > 0,) * count, (0,) * count)
            else:
                choice = choose_sources(plan, k, candidates)
                k = choice.k
            read = missed = 0
            for candidate, new, by_head in zip(candidates, fresh, choice.head, strict=True):
                candidate.unread = min(WINDOW, candidate.unread + new)
                if by_head:
                    missed += max(0, candidate.unread - new)
                    read, candidate.unread = read + candidate.unread, 0
            pending = [
                (HEAD, k) if by_head else (LOOKUP, lookup)
                for by_head, lookup in zip(choice.head, choice.lookups, strict=True)
            ]
            ran = k > 0
            draft_s = self.hardware.draft(sum(choice.head), k, read) if ran else 0.0
            exact = draft_s + self.hardware.target(count, count + drafts, context)
            verify = sum(drafted > 0 for _, drafted in pending)
            exact += self.verifying_s * self.context * verify
            seconds = exact * (1.0 + rng.gauss(0.0, self.noise))
            self.seconds, self.steps, self.passes = (
                self.seconds + exact, self.steps + 1, self.passes + ran
            )  # fmt: skip
            head, lookup = (
                (counts_above(drafted), counts_above(accepted))
                for drafted, accepted in counts.values()
            )
            self.controller.observe(
                Step(
                    Load(count, context_tokens=context, draft_tokens=drafts),
                    k, seconds, made,
                    head[0][:K_MAX], head[1][:K_MAX], draft_seconds=draft_s,
                    others=(SourceCounts(LOOKUP, *lookup),) if sum(lookup[0]) else (),
                    looked_up=sum(map(bool, choice.lookups)), matches=tuple(matches),
                    missed_tokens_read=missed,
                )
            )  # fmt: skip

    @staticmethod
    def _match(
        rng: random.Random, length: int, rate: float, new: int, verified: int, failed: bool
    ) -> Match:
        """How a match went on in `new` tokens: its first `verified` ones are known to be right, the
        one behind them to be wrong if the lookup `failed`. The others are drawn."""
        compared = min(new, LOOKUP_K)
        equal = min(verified, compared)
        while not failed and equal < compared and rng.random() < rate:
            equal += 1
        return Match(length, compared, equal)

    @staticmethod
    def _draw(rng: random.Random, kind: Kind) -> tuple[int, float]:
        draw = rng.random()
        for probability, length, rate in kind.matches:
            draw -= probability
            if draw < 0.0:
                return length, rate
        return 0, 0.0

    @property
    def tokens_per_second(self) -> float:
        """Expected tokens over seconds without noise."""
        return self.tokens / self.seconds
