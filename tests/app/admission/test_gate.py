"""The gate: places, fair order, who is turned away, and no place lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from app.admission.gate import Gate, GateFull, Place
from app.admission.tenants import Tenant

A, B, C = (Tenant(name=name) for name in "abc")


def make(places: int = 1, waiting: int = 8) -> Gate:
    return Gate(lambda: places, lambda overloaded: waiting, lambda: False)


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def test_places_are_counted_in_sequences() -> None:
    async def scenario() -> None:
        gate = make(places=4)
        first = await gate.enter(A, 3)
        second = asyncio.create_task(gate.enter(A, 2))
        await settle()
        assert not second.done()
        assert gate.waiting == 1
        gate.leave(first)
        await second
        assert (gate.inside, gate.waiting) == (2, 0)

    run(scenario())


def test_a_request_larger_than_the_engine_gets_it_alone() -> None:
    async def scenario() -> None:
        gate = make(places=4)
        place = await asyncio.wait_for(gate.enter(A, 100), 1)
        assert gate.inside == 4
        gate.leave(place)
        assert gate.inside == 0

    run(scenario())


def test_the_tenant_with_fewer_inside_is_next() -> None:
    """One tenant's flood does not delay another's first request by more than one place."""

    async def scenario() -> None:
        gate = make(places=2, waiting=100)
        inside = [await gate.enter(A, 1), await gate.enter(A, 1)]
        flood = [asyncio.create_task(gate.enter(A, 1)) for _ in range(20)]
        await settle()
        late = asyncio.create_task(gate.enter(B, 1))
        await settle()
        gate.leave(inside.pop())
        await settle()
        assert late.done()
        assert not any(task.done() for task in flood)
        for task in flood:
            task.cancel()

    run(scenario())


def test_priority_comes_before_fairness() -> None:
    async def scenario() -> None:
        gate = make(waiting=100)
        first = await gate.enter(A, 1)
        plain = asyncio.create_task(gate.enter(B, 1))
        await settle()
        urgent = asyncio.create_task(gate.enter(Tenant(name="u", priority=-1), 1))
        await settle()
        gate.leave(first)
        await settle()
        assert urgent.done() and not plain.done()
        plain.cancel()

    run(scenario())


def test_full_turns_away_the_one_who_has_most_waiting() -> None:
    async def scenario() -> None:
        gate = make(waiting=3)
        await gate.enter(A, 1)
        waiting = [asyncio.create_task(gate.enter(A, 1)) for _ in range(3)]
        await settle()
        with pytest.raises(GateFull):
            gate.check(A)
        with pytest.raises(GateFull) as caught:
            await gate.enter(A, 1)
        assert caught.value.retry_after_s >= 1
        gate.check(B)
        newcomer = asyncio.create_task(gate.enter(B, 1))
        await settle()
        with pytest.raises(GateFull):
            await waiting[2]
        assert not waiting[0].done() and not waiting[1].done() and not newcomer.done()
        # B has one of three now and A two: a second request of B would make B the larger.
        with pytest.raises(GateFull):
            await gate.enter(B, 1)
        for task in (*waiting, newcomer):
            task.cancel()

    run(scenario())


def test_nobody_may_wait() -> None:
    async def scenario() -> None:
        gate = make(waiting=0)
        place = await gate.enter(A, 1)
        with pytest.raises(GateFull):
            await gate.enter(B, 1)
        gate.leave(place)
        await gate.enter(B, 1)

    run(scenario())


def test_an_overload_that_lasts_shortens_the_queue() -> None:
    """A queue that stays full makes everybody wait as long as it is, and serves nobody more."""

    async def scenario() -> None:
        now = [0.0]
        gate = Gate(
            lambda: 2, lambda overloaded: 1 if overloaded else 3, lambda: False, lambda: now[0]
        )
        inside = [await gate.enter(A, 1) for _ in range(2)]
        waiting = [asyncio.create_task(gate.enter(A, 1)) for _ in range(3)]
        await settle()

        def turned_away() -> bool:
            try:
                gate.check(A)
            except GateFull:
                return True
            return False

        assert turned_away()
        gate.leave(inside.pop())
        await settle()
        assert not turned_away(), "a burst may fill the queue"
        waiting.append(asyncio.create_task(gate.enter(A, 1)))
        await settle()
        held_s = gate._held_s
        for _ in range(3):
            now[0] += 0.6 * held_s
            assert turned_away()
        inside.append(await waiting.pop(0))
        gate.leave(inside.pop())
        await settle()
        assert gate.waiting == 2
        assert turned_away(), "more than one may still wait"
        now[0] += 2 * gate._held_s
        assert not turned_away(), "the overload is over, and the queue is as short as before"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    run(scenario())


def test_pressure_holds_everybody_back_but_not_an_empty_engine() -> None:
    async def scenario() -> None:
        pressed = [True]
        gate = Gate(lambda: 8, lambda overloaded: 8, lambda: pressed[0])
        first = await asyncio.wait_for(gate.enter(A, 1), 1)
        second = asyncio.create_task(gate.enter(A, 1))
        third = asyncio.create_task(gate.enter(A, 1))
        await settle()
        assert not second.done()
        gate.leave(first)
        await settle()
        assert second.done() and not third.done()
        pressed[0] = False
        gate.poke()
        await settle()
        assert third.done()

    run(scenario())


def test_no_place_is_ever_lost() -> None:
    """Random arrivals, cancellations at any moment (the one of being let in, too) and leaves:
    never more inside than places, everybody is served or told, nothing remains."""

    async def scenario(seed: int) -> None:
        dice = random.Random(seed)
        gate = make(places=3, waiting=6)
        served, turned_away = 0, 0

        async def visit(tenant: Tenant) -> None:
            nonlocal served, turned_away
            place: Place | None = None
            try:
                place = await gate.enter(tenant, dice.randint(1, 4))
                assert gate.inside <= 3
                for _ in range(dice.randint(0, 4)):
                    await asyncio.sleep(0)
                served += 1
            except GateFull:
                turned_away += 1
            finally:
                if place is not None:
                    gate.leave(place)

        tasks: list[asyncio.Task[None]] = []
        for _ in range(300):
            tasks.append(asyncio.create_task(visit(dice.choice([A, B, C]))))
            if dice.random() < 0.3:
                dice.choice(tasks).cancel()
            for _ in range(dice.randint(0, 3)):
                await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        problems = [t.exception() for t in tasks if not t.cancelled() and t.exception()]
        assert not problems
        assert (gate.inside, gate.waiting) == (0, 0)
        assert not gate._queues and not gate._inside
        assert served and turned_away

    for seed in range(20):
        run(scenario(seed))
