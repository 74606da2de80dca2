"""The admission queue: which request gets a slot in the engine next, and which is rejected.

Requests wait here and not in the engine, for three reasons: the order can be fair between
tenants, a request that waits too long has cost nothing, and a full queue is known before the body
is read.

Order: by priority, then the tenant with the fewest running sequences, then by arrival. When the
queue is full, the tenant with the most waiting requests loses one. If that is the newcomer's
tenant, the newcomer is rejected, else the newest request of the other tenant.

Nobody overtakes a request of many sequences, which would wait for ever. It is let in once an eighth
of the slots is free, and those of its sequences that have no slot wait in the engine: if it waited
for a slot for each, these slots would stay empty meanwhile, and everybody would wait behind it.

A queue is good for a burst, which is gone in about the time that a slot is held. Rejections that
last longer than that mean an overload: then a queue that stays full serves nobody sooner and
makes everybody wait, so fewer requests may wait in it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from app.admission.tenants import Tenant
from app.observability import metrics

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
# Weight of the newest request in the moving average of the time that a slot is held.
EWMA_WEIGHT = 0.1
# A request of many sequences is let in once one slot in so many is free. By default the slots are
# an eighth more than the engine's batch, so that it is let in when the batch has room.
LARGE_REQUEST_SHARE = 8


class QueueFull(Exception):
    """The request is rejected; the client may try again in `retry_after_s`."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__("the admission queue is full")
        self.retry_after_s = retry_after_s


@dataclass(eq=False)
class Slot:
    """Room for `sequences` in the engine, held until `AdmissionQueue.release`."""

    tenant: Tenant
    sequences: int
    acquired_at: float
    number: int  # in the order in which slots were given


@dataclass(eq=False)
class _Waiter:
    """One waiting request; `slot` ends with its slot or with QueueFull."""

    tenant: Tenant
    sequences: int
    arrival: int
    slot: asyncio.Future[Slot]


@dataclass
class AdmissionQueue:
    """Slots for sequences in the engine, and the requests that wait for one.

    `slots` is how many sequences may run at once, but for those of a request that is let in with
    fewer slots than it has sequences. `max_waiting` is how many requests may wait,
    given whether there is an overload. `saturated` is whether the engine has too little room
    however many slots are free.
    """

    slots: Callable[[], int]
    max_waiting: Callable[[bool], int]
    saturated: Callable[[], bool]
    clock: Callable[[], float] = time.monotonic
    running: int = 0  # sequences that hold slots
    waiting: int = 0  # requests without a slot
    _running_by_tenant: Counter[str] = field(default_factory=Counter)
    _waiters: dict[str, deque[_Waiter]] = field(default_factory=dict)
    _arrivals: int = 0
    _admitted: int = 0
    _average_hold_s: float = 1.0
    _rejecting_since: float = -math.inf
    _last_rejected_at: float = -math.inf

    def check(self, tenant: Tenant) -> None:
        """Raise QueueFull if a request of this tenant would be rejected now."""
        if self.waiting and self._full() and self._request_to_shed(tenant) is None:
            raise self._rejection()

    async def acquire(self, tenant: Tenant, sequences: int) -> Slot:
        """Wait for a slot. Cancelling the call gives up the request's turn.

        Raises QueueFull at once, or later if another tenant's request displaces this one.
        """
        sequences = min(sequences, max(1, self.slots()))
        if not self.waiting and self._fits(sequences):
            return self._admit(tenant, sequences)
        if self._full():
            shed = self._request_to_shed(tenant)
            if shed is None:
                raise self._rejection()
            self._remove(shed)
            if not shed.slot.done():
                shed.slot.set_exception(self._rejection())
        self._arrivals += 1
        slot: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(tenant, sequences, self._arrivals, slot)
        self._waiters.setdefault(tenant.name, deque()).append(waiter)
        self.waiting += 1
        self._update_metrics()
        self.dispatch()
        try:
            return await slot
        except asyncio.CancelledError:
            if slot.done() and not slot.cancelled() and slot.exception() is None:
                self.release(slot.result())  # admitted and cancelled in the same moment
            else:
                self._remove(waiter)
                self.dispatch()
            raise

    def release(self, slot: Slot) -> None:
        """Free a slot and admit the requests that fit now."""
        self.running -= slot.sequences
        name = slot.tenant.name
        self._running_by_tenant[name] -= slot.sequences
        if self._running_by_tenant[name] <= 0:
            del self._running_by_tenant[name]
        hold_s = self.clock() - slot.acquired_at
        self._average_hold_s += EWMA_WEIGHT * (hold_s - self._average_hold_s)
        self.dispatch()
        self._update_metrics()

    def dispatch(self) -> None:
        """Admit waiting requests, in order, while the first of them fits."""
        while self.waiting:
            first = self._first_waiter()
            if first.slot.done():  # cancelled, and its task has not run since
                self._remove(first)
                continue
            if not self._fits(first.sequences):
                return
            self._remove(first)
            first.slot.set_result(self._admit(first.tenant, first.sequences))

    @property
    def retry_after_s(self) -> float:
        """Estimated seconds until every request that waits now has been admitted."""
        rounds = (self.waiting + 1) / max(1, self.slots())
        return min(MAX_RETRY_S, max(MIN_RETRY_S, math.ceil(rounds * self._average_hold_s)))

    @property
    def overloaded(self) -> bool:
        """Whether there is an overload.

        It begins when requests have been rejected for longer than a slot is held, and ends when
        none has been rejected for as long.
        """
        lasting = self._last_rejected_at - self._rejecting_since > self._average_hold_s
        return lasting and self.clock() - self._last_rejected_at <= self._average_hold_s

    def _full(self) -> bool:
        return self.waiting >= self.max_waiting(self.overloaded)

    def _rejection(self) -> QueueFull:
        """Note a rejection and return its exception."""
        now = self.clock()
        if now - self._last_rejected_at > self._average_hold_s:
            self._rejecting_since = now
        self._last_rejected_at = now
        return QueueFull(self.retry_after_s)

    def _fits(self, sequences: int) -> bool:
        if self.running == 0:
            return True
        needed = min(sequences, max(1, self.slots() // LARGE_REQUEST_SHARE))
        return self.running + needed <= self.slots() and not self.saturated()

    def _admit(self, tenant: Tenant, sequences: int) -> Slot:
        self.running += sequences
        self._running_by_tenant[tenant.name] += sequences
        self._update_metrics()
        self._admitted += 1
        return Slot(tenant, sequences, self.clock(), self._admitted)

    def _first_waiter(self) -> _Waiter:
        """The waiting request whose turn is next."""
        heads = [waiters[0] for waiters in self._waiters.values()]
        return min(
            heads,
            key=lambda w: (w.tenant.priority, self._running_by_tenant[w.tenant.name], w.arrival),
        )

    def _request_to_shed(self, tenant: Tenant) -> _Waiter | None:
        """The waiting request to displace with one of `tenant`; None rejects the newcomer."""
        if not self._waiters:
            return None
        own = len(self._waiters.get(tenant.name, ())) + 1
        longest = max(
            self._waiters.values(), key=lambda waiters: (waiters[-1].tenant.priority, len(waiters))
        )
        newest = longest[-1]
        if (newest.tenant.priority, len(longest)) <= (tenant.priority, own):
            return None
        return newest

    def _remove(self, waiter: _Waiter) -> None:
        """Take a request out of the queue, if it is still in it."""
        waiters = self._waiters.get(waiter.tenant.name)
        if waiters is None or waiter not in waiters:
            return
        waiters.remove(waiter)
        if not waiters:
            del self._waiters[waiter.tenant.name]
        self.waiting -= 1
        self._update_metrics()

    def _update_metrics(self) -> None:
        metrics.ADMISSION_WAITING.set(self.waiting)
        metrics.ADMISSION_RUNNING.set(self.running)
