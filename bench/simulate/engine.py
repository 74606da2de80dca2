"""A simulated engine: requests, steps and drafts as a scheduler sees them, without tensors."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from bench.simulate.hardware import Hardware
from bench.simulate.traces import Trace
from drafters.config import DrafterConfig
from drafters.control.policy import Load, Policy, Step, count_draft_limits, counts_above

NOISE = 0.03  # standard deviation of the logarithm of a step's time
PAUSES, PAUSE = 0.0005, 20.0  # share of steps that are pauses, and how many times as long they take
PROMPT_BUDGET = 2048  # prompt tokens that a step may read
CATCH_UP = DrafterConfig.catch_up_tokens  # skipped tokens per request that the drafter catches up


@dataclass(slots=True)
class Request:
    """The state of a request in the engine."""

    survival: Sequence[float]  # share of its drafts that are accepted up to each position
    prompt: int  # prompt tokens still to be read
    output: int  # output tokens still to be made
    context: int = 0
    drafted: int = 0  # drafts that wait for verification
    limit: int | None = None  # its largest K
    unseen: int = 0  # tokens that the drafter has not read
    arrived: float = 0.0


@dataclass(slots=True)
class SimulationTotals:
    """Sums over a simulated run."""

    tokens: int = 0
    steps: int = 0
    busy_s: float = 0.0
    elapsed_s: float = 0.0
    waited_s: float = 0.0  # from arrival to the last token, over all answered requests
    # Expected values of tokens and seconds, without random draws and noise.
    expected_tokens: float = 0.0
    expected_s: float = 0.0
    timeline: list[tuple[float, int, int]] = field(default_factory=list)  # (time, requests, K)


class SimulatedEngine:
    """Runs a trace under a policy.

    A step is observed when K of `lag` later ones is chosen too: 1 where vLLM's engine and worker
    are processes of their own, 3 on its V2 runner. With `together`, steps are observed
    `max_unobserved_steps` at a time, as with one process on a CPU. `pace` is how many
    times as long as on a quiet machine a step takes that begins at some second. The nth plain step
    after drafts takes 1 + `slow_after_drafts` / n times as long as later ones.
    """

    def __init__(
        self,
        hardware: Hardware,
        policy: Policy,
        trace: Trace,
        rng: random.Random,
        *,
        max_requests: int = 256,
        noise: float = NOISE,
        pauses: float = PAUSES,
        lag: int = 0,
        together: bool = False,
        pace: Callable[[float], float] = lambda second: 1.0,
        slow_after_drafts: float = 0.0,
    ) -> None:
        self.hardware, self.policy, self.trace, self._rng = hardware, policy, trace, rng
        self._max_requests, self._noise, self._pauses = max_requests, noise, pauses
        self._lag, self._together = lag, together
        self._pace, self._slow_after_drafts = pace, slow_after_drafts
        self._plain_steps = 0  # since a step made or verified drafts
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._unobserved: deque[Step] = deque()
        self.totals = SimulationTotals()

    def run(self, steps: int | None = None, until: float = math.inf) -> SimulationTotals:
        """Run to the trace's end, or for `steps` steps or `until` seconds."""
        for step in self.steps():
            if self.totals.steps == steps or self.totals.elapsed_s >= until:
                break
            del step
        return self.totals

    def steps(self) -> Iterator[Step]:
        """Run the trace to its end, and yield every step."""
        while True:
            now = self.totals.elapsed_s
            inflight = len(self._waiting) + len(self._running)
            for request in self.trace.due(now, inflight):
                request.arrived = now
                self._waiting.append(request)
            if not self._waiting and not self._running:
                later = self.trace.next_after(now)
                if later is None:
                    return
                self.totals.elapsed_s = later
                continue
            yield self._step()

    def _step(self) -> Step:
        prompts = self._read_prompts()
        decoding = [request for request in self._running if request.prompt == 0]
        load = Load(
            requests=len(decoding),
            prefill_tokens=prompts,
            context_tokens=sum(request.context for request in decoding),
            draft_tokens=sum(request.drafted for request in decoding),
            requests_by_draft_limit=self._by_limit(decoding),
        )
        k = self.policy.choose(load)
        before = [request.context for request in decoding]
        drafted, accepted, made = self._verify(decoding)
        for request, context in zip(decoding, before, strict=True):
            if k == 0:
                request.unseen += request.context - context
            request.drafted = k if request.limit is None else min(k, request.limit)
        unseen = 0
        for request in self._running:
            request.unseen = min(CATCH_UP, request.unseen)
            if k:
                unseen += request.unseen if request.limit != 0 else 0
                request.unseen = 0
        hardware = self.hardware
        verified = load.requests + load.draft_tokens + prompts
        drafting = hardware.draft(load.draft_tokens_at(1), k, unseen)
        exact = drafting + hardware.target(load.requests, verified, load.context_tokens)
        self._plain_steps = 0 if k or load.draft_tokens else self._plain_steps + 1
        if self._plain_steps:
            exact *= 1.0 + self._slow_after_drafts / self._plain_steps
        seconds = exact * self._pace(self.totals.elapsed_s)
        seconds *= math.exp(self._rng.gauss(0.0, self._noise))
        if self._rng.random() < self._pauses:
            seconds *= PAUSE
        totals = self.totals
        totals.steps += 1
        totals.tokens += made
        totals.busy_s += seconds
        totals.elapsed_s += seconds
        totals.expected_s += exact
        if not totals.timeline or totals.timeline[-1][1:] != (load.requests, k):
            totals.timeline.append((totals.elapsed_s, load.requests, k))
        for request in decoding:
            if request.output == 0:
                totals.waited_s += totals.elapsed_s - request.arrived
        self._running = [request for request in self._running if request.output > 0]
        share = drafting / exact
        step = Step(load, k, seconds, made, drafted, accepted, draft_seconds=share * seconds)
        self._unobserved.append(step)
        wanted = self.policy.max_unobserved_steps if self._together else 1
        if len(self._unobserved) - self._lag >= wanted:
            while len(self._unobserved) > self._lag:
                self.policy.observe(self._unobserved.popleft())
        return step

    def _by_limit(self, decoding: list[Request]) -> tuple[int, ...]:
        if all(request.limit is None for request in decoding):
            return ()
        k_max = self.policy.k_max
        limits = (k_max if request.limit is None else request.limit for request in decoding)
        return count_draft_limits([min(k_max, limit) for limit in limits], k_max)

    def _read_prompts(self) -> int:
        budget = PROMPT_BUDGET
        for request in self._running:
            budget -= self._read(request, budget)
        while self._waiting and budget > 0 and len(self._running) < self._max_requests:
            request = self._waiting.popleft()
            budget -= self._read(request, budget)
            self._running.append(request)
        return PROMPT_BUDGET - budget

    @staticmethod
    def _read(request: Request, budget: int) -> int:
        tokens = min(request.prompt, budget)
        request.prompt -= tokens
        request.context += tokens
        request.unseen += tokens
        return tokens

    def _verify(self, decoding: list[Request]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Drafts verified and accepted at each position, and tokens made."""
        draw, made = self._rng.random, 0
        offers = [0] * (self.policy.k_max + 1)
        ends = [0] * (self.policy.k_max + 1)
        for request in decoding:
            drafted = request.drafted
            hits = 0
            if drafted:
                # Survival falls with the position: drafts are accepted while it is above the draw.
                hits = bisect_left(request.survival, -draw(), hi=drafted, key=float.__neg__)
                offers[drafted] += 1
                ends[hits] += 1
                left = min(drafted, request.output - 1)  # of drafts that may become tokens
                self.totals.expected_tokens += sum(request.survival[:left])
            tokens = min(hits + 1, request.output)
            made += tokens
            request.output -= tokens
            request.context += tokens
        self.totals.expected_tokens += len(decoding)
        return counts_above(offers), counts_above(ends), made
