"""Limits on bytes in flight: waiting, order, and release."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tidemill.protocol.in_flight import InFlightLimiter, MemoryBudget

SECONDS = 120


async def test_an_item_waits_for_a_slot_although_its_bytes_fit() -> None:
    """A slot is free when an item leaves, and its bytes when they are released."""
    room = InFlightLimiter(100, max_items=2)
    await room.acquire(10)
    await room.acquire(10)
    third = asyncio.create_task(room.acquire(10))
    await asyncio.sleep(0)
    assert not third.done()
    room.release()
    await asyncio.wait_for(third, SECONDS)
    fourth = asyncio.create_task(room.acquire(80))
    room.release()
    await asyncio.sleep(0)
    assert not fourth.done()
    room.release_bytes(20)
    await asyncio.wait_for(fourth, SECONDS)


async def test_an_item_cancelled_at_its_turn_passes_its_slot_on() -> None:
    """The next one enters, and nothing stays held."""
    room = InFlightLimiter(100, max_items=1)
    await room.acquire(100)
    waiting, last = (asyncio.create_task(room.acquire(100)) for _ in range(2))
    await asyncio.sleep(0)
    room.release(100)
    waiting.cancel()
    await asyncio.wait_for(last, SECONDS)
    assert waiting.cancelled()
    room.release(100)
    await asyncio.wait_for(room.acquire(100), SECONDS)


async def test_the_shortest_enters_first_except_every_eighth_time() -> None:
    """A long item is overtaken seven times at most, and a short one waits for one long item."""
    room, order = InFlightLimiter(100, shortest_first=True), list[int]()

    async def enter(num_bytes: int) -> None:
        async with room.reserve(num_bytes):
            order.append(num_bytes)

    async with room.reserve(100):
        sizes = [99, 98, *range(60, 75)]
        waiting = [asyncio.create_task(enter(size)) for size in sizes]
        await asyncio.sleep(0)
    await asyncio.wait_for(asyncio.gather(*waiting), SECONDS)
    assert order == [*range(60, 67), 99, *range(67, 74), 98, 74]


async def test_a_fitting_item_passes_a_larger_one_with_shortest_first() -> None:
    """In order of arrival it waits."""
    for shortest_first in (True, False):
        room = InFlightLimiter(100, shortest_first=shortest_first)
        await room.acquire(60)
        sizes = (90, 40)
        _, short = waiting = [asyncio.create_task(room.acquire(size)) for size in sizes]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert short.done() is shortest_first
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def test_threads_wait_for_memory_in_order() -> None:
    """One above the limit runs alone, and later ones do not overtake it."""
    budget, order = MemoryBudget(100), list[int]()
    go_on = threading.Event()
    now = most = 0
    lock = threading.Lock()

    def work(num_bytes: int) -> None:
        nonlocal now, most
        with budget.reserve(num_bytes):
            with lock:
                order.append(num_bytes)
                now += num_bytes
                most = max(most, now)
            go_on.wait(SECONDS)
            with lock:
                now -= num_bytes

    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(work, 60)
        while not order:
            threading.Event().wait(0.001)
        others = []
        for waiting, num_bytes in enumerate((1_000, 50, 40), start=1):
            others.append(threads.submit(work, num_bytes))
            while len(budget._waiters) < waiting:
                threading.Event().wait(0.001)
        assert order == [60]
        go_on.set()
        for done in (first, *others):
            done.result(SECONDS)
    assert order[:2] == [60, 1_000]
    assert most == 1_000


def test_one_thread_at_a_time_may_exceed_its_reservation() -> None:
    """The next one follows when it is done; threads within their reservation do not wait."""
    budget = MemoryBudget(100)
    with budget.reserve(10) as first:
        first.grow(50)
        first.grow(500)
        with ThreadPoolExecutor(1) as threads, budget.reserve(20) as second:
            second.grow(20)
            beyond = threads.submit(second.grow, 21)
            with pytest.raises(TimeoutError):
                beyond.result(0.02)
            first.release()
            beyond.result(SECONDS)
    with budget.reserve(100) as last:
        last.grow(101)


def test_a_failure_releases_its_memory() -> None:
    """It releases its reservation and its turn to exceed it."""
    budget = MemoryBudget(10)

    def fail() -> None:
        with budget.reserve(10) as reservation:
            reservation.grow(11)
            raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fail()
