"""A short soak test: clients of many kinds leave nothing behind in the server."""

from __future__ import annotations

import asyncio
import random

import pytest

from bench.server.served import Place
from bench.server.soak import (
    HABITS,
    Seen,
    come,
    hollow,
    many,
    run_batch,
    settled,
    state,
    tokenizing,
    visit,
)


@pytest.mark.parametrize("seed", [0, 1])
def test_clients_of_all_kinds_leave_nothing_behind(place: Place, seed: int) -> None:
    """No sequence runs or waits, no page is held, and every well-behaved client got its reply."""
    seen = Seen()

    async def held() -> tuple[dict[str, float], dict[str, float]]:
        before = await state(place)
        await come(place, visits=120, at_once=12, seed=seed, seen=seen)
        return before, await settled(place, before)

    before, after = asyncio.run(held())
    assert after == before
    assert dict(seen.faults) == {}
    assert set(seen.visits) == {habit.__name__ for habit in HABITS}


def test_large_requests_and_a_batch_leave_nothing_behind(place: Place) -> None:
    """They are long texts, many prompts, and a body that would expand to a gigabyte."""
    seen = Seen()

    async def held() -> tuple[dict[str, float], dict[str, float]]:
        before = await state(place)
        for habit in (tokenizing, many, hollow):
            await visit(place, habit, random.Random(1), seen)
        await run_batch(place, 1, seen)
        return before, await settled(place, before)

    before, after = asyncio.run(held())
    assert after == before
    assert dict(seen.faults) == {}
