"""Demand for workers from open work."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tidemill.batch.fleet import FleetPlan, OpenWork, WorkerRate
from tidemill.handler.fleet.demand import estimate_demand, start_order

NOW = 1_000_000
PLAN = FleetPlan("m", "ecs", "r:1", max_workers=10, target_seconds=3600, start_seconds=300)
PACE = WorkerRate(NOW, rows_per_second=10.0)
DAY = 24 * 3600


def work_of(seconds: float, **changes: Any) -> OpenWork:
    """Return a batch that takes one worker that many seconds, and has shards for all."""
    fields: dict[str, Any] = {"num_shards": 100, "since": NOW, "expires_at": NOW + DAY} | changes
    return OpenWork("b", "m", int(seconds * PACE.rows_per_second), **fields)


def count(*work: OpenWork, pace: WorkerRate = PACE, ready_at: tuple[float, ...] = ()) -> int:
    """Return how many workers are wanted."""
    return estimate_demand(work, pace, PLAN, ready_at=ready_at, now=NOW).count


def test_no_open_batch_needs_no_worker() -> None:
    """Batches whose shards are all done or given up need none either."""
    assert count() == 0
    assert count(work_of(100, num_shards=0)) == 0


def test_models_start_in_the_order_of_the_batches() -> None:
    """By priority and deadline within a tenant; its first model delays no other tenant's first."""
    soon = {"expires_at": NOW + 9}
    works = {
        "late": [work_of(1, tenant="t", priority=1)],
        "first": [work_of(1, tenant="t", priority=9, **soon), work_of(1, tenant="t", priority=-9)],
        "middle": [work_of(1, tenant="t")],
        "other": [work_of(1, tenant="u", priority=50, **soon)],
        "none": [],
    }
    assert start_order(works) == ["other", "first", "middle", "late"]
    assert start_order({"b": [work_of(1)], "a": [work_of(1, **soon)]}) == ["a", "b"]


def test_a_tenant_without_a_running_worker_starts_first() -> None:
    """Another one with a stream of short batches, of any models, does not delay its first one."""
    short = {"tenant": "t", "expires_at": NOW + 1800}
    works = {
        "short": [work_of(1, **short)],
        "shorter": [work_of(1, tenant="t", expires_at=NOW + 60)],
        "long": [work_of(1, tenant="u")],
    }
    assert start_order(works) == ["shorter", "long", "short"]
    works["short"][0] = work_of(1, num_running=1, **short)
    assert start_order(works) == ["long", "shorter", "short"]


@pytest.mark.parametrize(("seconds", "wants"), [(1, 1), (3300, 1), (3301, 2), (16_500, 5)])
def test_what_is_open_is_done_by_its_target(seconds: float, wants: int) -> None:
    """Within the hour, of which each worker spends five minutes starting."""
    assert count(work_of(seconds)) == wants


def test_no_more_than_allowed_or_of_use() -> None:
    """The plan's maximum holds, and a worker without a shard would only cost money."""
    assert count(work_of(DAY)) == 10
    assert count(work_of(16_500, num_shards=3)) == 3
    assert count(work_of(16_500, num_shards=3, num_running=2), ready_at=(NOW, NOW)) == 3
    assert count(work_of(16_500, num_shards=3, num_running=3), ready_at=(NOW,)) == 1


def test_a_dead_workers_shards_want_one() -> None:
    """Until their leases lapse no other worker may take them: one must be running then."""
    assert count(work_of(5, num_shards=2, num_running=2)) == 1


def test_an_unknown_rate_wants_one_worker_that_measures_it() -> None:
    """The amount of open work does not matter: a guess might pay for ten cold starts."""
    for pace in (WorkerRate(), WorkerRate(NOW)):
        found = estimate_demand([work_of(DAY)], pace, PLAN, ready_at=(), now=NOW)
        assert found.count == 1
        assert "not known" in found.why


def test_tokens_tell_long_lines_from_short_ones() -> None:
    """Rows of another batch may have been a hundred times as long."""
    pace = WorkerRate(NOW, rows_per_second=10.0, tokens_per_second=100.0)
    assert count(work_of(3300, tokens_left=330_000), pace=pace) == 1
    assert count(work_of(3300, tokens_left=3_300_000), pace=pace) == 10
    assert count(work_of(3300, tokens_left=0), pace=pace) == 1
    pace = replace(pace, expected_work_per_second=200.0)
    assert count(work_of(3300, expected_work=6_600_000.0), pace=pace) == 10
    assert count(work_of(3300, tokens_left=330_000, expected_work=1.0), pace=pace) == 1


def test_workers_that_start_are_not_started_again() -> None:
    """While they load their model the time left shrinks, and they count from when they are ready.

    Without that the number would creep up by the minute.
    """
    wants = count(work_of(16_500))
    for minute in range(6):
        ready_at = (NOW + 300.0,) * wants
        found = estimate_demand(
            [work_of(16_500)], PACE, PLAN, ready_at=ready_at, now=NOW + 60 * minute
        )
        assert found.count == wants


def test_workers_that_run_do_more_than_new_ones() -> None:
    """An hour of work for one that is there needs no second one."""
    assert count(work_of(3600), ready_at=(NOW,)) == 1
    assert count(work_of(3600)) == 2


def test_a_window_that_ends_soon_is_worth_more_starts() -> None:
    """A target may be missed by a little; what the window cuts off is lost."""
    late_for_target = work_of(1500, since=NOW - 3600)
    assert count(late_for_target) == 5  # each works as long as it takes to start
    assert count(work_of(480, expires_at=NOW + 360)) == 8


def test_whatever_is_open_what_is_wanted_is_in_bounds() -> None:
    """It is at least one, never above the maximum or the useful number, and grows with the work."""
    for seed in range(300):
        random = Random(seed)
        batches = [
            work_of(
                random.expovariate(1 / 5000),
                num_shards=random.randint(1, 9),
                num_running=random.randint(0, 1),
                since=NOW - random.randint(0, 7200),
                expires_at=NOW + random.randint(1, DAY),
                tokens_left=random.choice([0, 7_000, 7_000_000]),
                expected_work=random.choice([0.0, 5_000.0]),
            )
            for _ in range(random.randint(1, 6))
        ]
        pace = WorkerRate(NOW, 10.0, random.choice([0.0, 50.0]), random.choice([0.0, 70.0]))
        ready_at = tuple(NOW + random.randint(-600, 300) for _ in range(random.randint(0, 12)))
        found = count(*batches, pace=pace, ready_at=ready_at)
        assert 1 <= found <= min(PLAN.max_workers, sum(each.num_shards for each in batches))
        more = replace(batches[0], num_rows=3 * batches[0].num_rows)
        assert count(more, *batches[1:], pace=pace, ready_at=ready_at) >= found
        assert count(*batches[1:], pace=pace, ready_at=ready_at) <= found


def test_earlier_ends_come_first() -> None:
    """A batch that is due later needs no more workers as long as it can run afterwards."""
    soon, late = work_of(1500, since=NOW - 1800), work_of(1500)
    assert count(soon) == 1
    assert count(soon, late) == 1
    assert count(soon, late, work_of(1500)) == 2
