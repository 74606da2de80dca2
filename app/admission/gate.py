"""The gate: who gets a place in the engine next, and who is turned away.

Requests wait here and not in the engine, for three reasons: the order can be fair between
tenants, a request that waits too long has cost nothing, and "full" is known at the door.

Order: by priority, then the tenant with the fewest sequences inside, then by arrival. When as
many wait as may, the tenant that has most requests waiting is turned away, be it the one who
comes or, if that one has fewer, the newest request of the other.

A queue is good for a burst, which is gone in about the time that a place is held. Whoever is
turned away for longer than that sees an overload: then a queue that stays full serves nobody
sooner and makes everybody wait, so fewer may stand in it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from app import metrics
from app.admission.tenants import Tenant

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
# Weight of the newest request in the average time that a place is held.
NEWEST = 0.1


class GateFull(Exception):
    """Turned away; try again in `retry_after_s`."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("the gate is full")
        self.retry_after_s = retry_after_s


@dataclass(eq=False)
class Place:
    """Room for `sequences` in the engine, held until `Gate.leave`."""

    tenant: str
    sequences: int
    since: float


@dataclass(eq=False)
class _Waiting:
    tenant: Tenant
    sequences: int
    arrived: int
    place: asyncio.Future[Place]


@dataclass
class Gate:
    """`places` is how many sequences fit in, `most_waiting` how many requests may wait for
    them (told whether there is an overload), and `pressed` whether the engine has too little
    room whatever its places say."""

    places: Callable[[], int]
    most_waiting: Callable[[bool], int]
    pressed: Callable[[], bool]
    clock: Callable[[], float] = time.monotonic
    inside: int = 0
    waiting: int = 0
    _inside: Counter[str] = field(default_factory=Counter)
    _queues: dict[str, deque[_Waiting]] = field(default_factory=dict)
    _arrivals: int = 0
    _held_s: float = 1.0
    _turning_away_since: float = -math.inf
    _turned_away_at: float = -math.inf

    def check(self, tenant: Tenant) -> None:
        """Raise GateFull if a request of this tenant would be turned away now."""
        if self.waiting and self._full() and self._victim(tenant) is None:
            raise self._turn_away()

    async def enter(self, tenant: Tenant, sequences: int) -> Place:
        """Wait for a place. Raises GateFull, at once or when somebody else displaces this one.
        Cancelling it gives the turn up."""
        sequences = min(sequences, max(1, self.places()))
        if not self.waiting and self._fits(sequences):
            return self._let_in(tenant.name, sequences)
        if self._full():
            victim = self._victim(tenant)
            if victim is None:
                raise self._turn_away()
            self._forget(victim)
            if not victim.place.done():
                victim.place.set_exception(self._turn_away())
        self._arrivals += 1
        place: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(tenant, sequences, self._arrivals, place)
        self._queues.setdefault(tenant.name, deque()).append(waiting)
        self.waiting += 1
        self._tell()
        self.poke()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.leave(place.result())  # let in and called off in the same moment
            else:
                self._forget(waiting)
                self.poke()
            raise

    def leave(self, place: Place) -> None:
        """Give the place back."""
        self.inside -= place.sequences
        self._inside[place.tenant] -= place.sequences
        if self._inside[place.tenant] <= 0:
            del self._inside[place.tenant]
        held_s = self.clock() - place.since
        self._held_s += NEWEST * (held_s - self._held_s)
        self.poke()
        self._tell()

    def poke(self) -> None:
        """Let in whoever fits. Nobody overtakes a large request whose turn it is: it would
        wait for ever."""
        while self.waiting:
            first = self._next()
            if first.place.done():  # called off, and its task has not run since
                self._forget(first)
                continue
            if not self._fits(first.sequences):
                return
            self._forget(first)
            first.place.set_result(self._let_in(first.tenant.name, first.sequences))

    @property
    def retry_after_s(self) -> float:
        """When the queue that is here now will have been let in, as far as one can tell."""
        rounds = (self.waiting + 1) / max(1, self.places())
        return min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(rounds * self._held_s)))

    @property
    def overloaded(self) -> bool:
        """Whether requests have been turned away for longer than a place is held, until none
        has been for as long."""
        lasting = self._turned_away_at - self._turning_away_since > self._held_s
        return lasting and self.clock() - self._turned_away_at <= self._held_s

    def _full(self) -> bool:
        return self.waiting >= self.most_waiting(self.overloaded)

    def _turn_away(self) -> GateFull:
        now = self.clock()
        if now - self._turned_away_at > self._held_s:
            self._turning_away_since = now
        self._turned_away_at = now
        return GateFull(self.retry_after_s)

    def _fits(self, sequences: int) -> bool:
        if self.inside == 0:
            return True
        return self.inside + sequences <= self.places() and not self.pressed()

    def _let_in(self, tenant: str, sequences: int) -> Place:
        self.inside += sequences
        self._inside[tenant] += sequences
        self._tell()
        return Place(tenant, sequences, self.clock())

    def _next(self) -> _Waiting:
        heads = [queue[0] for queue in self._queues.values()]
        return min(heads, key=lambda w: (w.tenant.priority, self._inside[w.tenant.name], w.arrived))

    def _victim(self, tenant: Tenant) -> _Waiting | None:
        """Whose turn the newcomer takes when no more may wait; None if nobody's."""
        if not self._queues:
            return None
        own = len(self._queues.get(tenant.name, ())) + 1
        fattest = max(
            self._queues.values(), key=lambda queue: (queue[-1].tenant.priority, len(queue))
        )
        newest = fattest[-1]
        if (newest.tenant.priority, len(fattest)) <= (tenant.priority, own):
            return None
        return newest

    def _forget(self, waiting: _Waiting) -> None:
        queue = self._queues.get(waiting.tenant.name)
        if queue is None or waiting not in queue:
            return
        queue.remove(waiting)
        if not queue:
            del self._queues[waiting.tenant.name]
        self.waiting -= 1
        self._tell()

    def _tell(self) -> None:
        metrics.GATE_WAITING.set(self.waiting)
        metrics.GATE_RUNNING.set(self.inside)
