"""The admission queue: slots, fair order, which request is rejected, and no slot lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from app.admission.queue import AdmissionQueue, QueueFull, Slot
from app.admission.tenants import Tenant

A, B, C = (Tenant(name=name) for name in "abc")


def make(slots: int = 1, waiting: int = 8) -> AdmissionQueue:
    return AdmissionQueue(lambda: slots, lambda overloaded: waiting, lambda: False)


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_slots_are_counted_in_sequences() -> None:
    queue = make(slots=16)
    first = await queue.acquire(A, 15)
    second = asyncio.create_task(queue.acquire(A, 2))
    await settle()
    assert not second.done()
    assert queue.waiting == 1
    queue.release(first)
    await second
    assert (queue.running, queue.waiting) == (2, 0)


async def test_no_request_overtakes_a_large_one_that_waits_until_it_gives_up() -> None:
    """Catches: a large request that waits for ever behind small ones; small ones that stay behind a
    large one which has gone."""
    queue = make(slots=16)
    await queue.acquire(A, 15)
    large = asyncio.create_task(queue.acquire(A, 2))
    await settle()
    small = asyncio.create_task(queue.acquire(A, 1))
    await settle()
    assert not large.done() and not small.done()
    large.cancel()
    await settle()
    assert small.done() and (queue.running, queue.waiting) == (16, 0)


async def test_a_large_request_waits_for_an_eighth_of_the_slots() -> None:
    """Catches: slots that stay empty, and everybody behind a request that waits for 128 of them; a
    large request that is counted as what it waited for."""
    queue = make(slots=288)
    held = [await queue.acquire(A, 1) for _ in range(253)]
    large = asyncio.create_task(queue.acquire(B, 128))
    small = asyncio.create_task(queue.acquire(C, 1))
    await settle()
    assert not large.done() and not small.done()
    queue.release(held.pop())
    await settle()
    assert large.done() and queue.running == 252 + 128
    for _ in range(92):
        queue.release(held.pop())
    await settle()
    assert not small.done()
    queue.release(held.pop())
    await settle()
    assert small.done()


async def test_a_request_larger_than_the_engine_gets_it_alone() -> None:
    queue = make(slots=4)
    slot = await asyncio.wait_for(queue.acquire(A, 100), 1)
    assert queue.running == 4
    queue.release(slot)
    assert queue.running == 0


async def test_the_tenant_with_fewer_running_is_next() -> None:
    """One tenant's flood does not delay another's first request by more than one slot."""
    queue = make(slots=2, waiting=100)
    running = [await queue.acquire(A, 1), await queue.acquire(A, 1)]
    flood = [asyncio.create_task(queue.acquire(A, 1)) for _ in range(20)]
    await settle()
    late = asyncio.create_task(queue.acquire(B, 1))
    await settle()
    queue.release(running.pop())
    await settle()
    assert late.done()
    assert not any(task.done() for task in flood)
    for task in flood:
        task.cancel()


async def test_priority_comes_before_fairness() -> None:
    queue = make(waiting=100)
    first = await queue.acquire(A, 1)
    plain = asyncio.create_task(queue.acquire(B, 1))
    await settle()
    urgent = asyncio.create_task(queue.acquire(Tenant(name="u", priority=-1), 1))
    await settle()
    queue.release(first)
    await settle()
    assert urgent.done() and not plain.done()
    plain.cancel()


async def test_a_full_queue_rejects_the_tenant_with_most_waiting() -> None:
    queue = make(waiting=3)
    await queue.acquire(A, 1)
    waiting = [asyncio.create_task(queue.acquire(A, 1)) for _ in range(3)]
    await settle()
    with pytest.raises(QueueFull):
        queue.check(A)
    with pytest.raises(QueueFull) as caught:
        await queue.acquire(A, 1)
    assert caught.value.retry_after_s >= 1
    queue.check(B)
    newcomer = asyncio.create_task(queue.acquire(B, 1))
    await settle()
    with pytest.raises(QueueFull):
        await waiting[2]
    assert not waiting[0].done() and not waiting[1].done() and not newcomer.done()
    # B has one of three now and A two: a second request of B would make B the larger.
    with pytest.raises(QueueFull):
        await queue.acquire(B, 1)
    for task in (*waiting, newcomer):
        task.cancel()


async def test_nobody_may_wait() -> None:
    queue = make(waiting=0)
    slot = await queue.acquire(A, 1)
    with pytest.raises(QueueFull):
        await queue.acquire(B, 1)
    queue.release(slot)
    await queue.acquire(B, 1)


async def test_an_overload_that_lasts_shortens_the_queue() -> None:
    """A queue that stays full makes everybody wait as long as it is, and serves nobody more."""
    now = [0.0]
    queue = AdmissionQueue(
        lambda: 2, lambda overloaded: 1 if overloaded else 3, lambda: False, lambda: now[0]
    )
    running = [await queue.acquire(A, 1) for _ in range(2)]
    waiting = [asyncio.create_task(queue.acquire(A, 1)) for _ in range(3)]
    await settle()

    def rejected() -> bool:
        try:
            queue.check(A)
        except QueueFull:
            return True
        return False

    assert rejected()
    queue.release(running.pop())
    await settle()
    assert not rejected(), "a burst may fill the queue"
    waiting.append(asyncio.create_task(queue.acquire(A, 1)))
    await settle()
    hold_s = queue._average_hold_s
    for _ in range(3):
        now[0] += 0.6 * hold_s
        assert rejected()
    running.append(await waiting.pop(0))
    queue.release(running.pop())
    await settle()
    assert queue.waiting == 2
    assert rejected(), "more than one may still wait"
    now[0] += 2 * queue._average_hold_s
    assert not rejected(), "the overload is over, and the queue is as short as before"
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_saturated_engine_admits_nobody_unless_it_is_empty() -> None:
    saturated = [True]
    queue = AdmissionQueue(lambda: 8, lambda overloaded: 8, lambda: saturated[0])
    first = await asyncio.wait_for(queue.acquire(A, 1), 1)
    second = asyncio.create_task(queue.acquire(A, 1))
    third = asyncio.create_task(queue.acquire(A, 1))
    await settle()
    assert not second.done()
    queue.release(first)
    await settle()
    assert second.done() and not third.done()
    saturated[0] = False
    queue.dispatch()
    await settle()
    assert third.done()


@pytest.mark.parametrize("seed", range(20))
async def test_no_slot_is_ever_lost(seed: int) -> None:
    """Random arrivals, releases and cancellations at any moment, also the one of admission: never
    more running than slots and the sequences of one request, every request is served or rejected,
    and nothing is left over."""
    dice = random.Random(seed)
    queue = make(slots=3, waiting=6)
    served, rejected = 0, 0

    async def request(tenant: Tenant) -> None:
        nonlocal served, rejected
        slot: Slot | None = None
        try:
            slot = await queue.acquire(tenant, dice.randint(1, 4))
            assert queue.running <= 2 + 3
            for _ in range(dice.randint(0, 4)):
                await asyncio.sleep(0)
            served += 1
        except QueueFull:
            rejected += 1
        finally:
            if slot is not None:
                queue.release(slot)

    tasks: list[asyncio.Task[None]] = []
    for _ in range(300):
        tasks.append(asyncio.create_task(request(dice.choice([A, B, C]))))
        if dice.random() < 0.3:
            dice.choice(tasks).cancel()
        for _ in range(dice.randint(0, 3)):
            await asyncio.sleep(0)
    await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    problems = [t.exception() for t in tasks if not t.cancelled() and t.exception()]
    assert not problems
    assert (queue.running, queue.waiting) == (0, 0)
    assert not queue._waiters and not queue._running_by_tenant
    assert served and rejected
