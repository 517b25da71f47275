"""History entries that workers add to a batch."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tests.batch.test_states import NEW
from tests.handler.worker.rig import Rig, until
from tidemill.batch.progress import YOUNG_SECONDS, HistoryBucket, history_bucket
from tidemill.batch.progress_counts import Progress
from tidemill.handler.worker.context.history import REPORT_SECONDS, Gains, History

DONE = Progress(3, 1, 40, 16, 12, 2.5)
RUNNING = replace(NEW, in_progress_at=1000)


@pytest.mark.parametrize(
    ("now", "bucket"),
    [
        (1000, (960, 60)),
        (1019.9, (960, 60)),
        (1020, (1020, 60)),
        (1000 + YOUNG_SECONDS - 0.1, (22_560, 60)),
        (1000 + YOUNG_SECONDS, (22_500, 900)),
    ],
)
def test_an_old_batch_has_longer_buckets(now: float, bucket: tuple[int, int]) -> None:
    """Fourteen days are a thousand and some of them."""
    assert history_bucket(RUNNING, now) == bucket


def test_gains_are_summed_by_batch_and_time() -> None:
    """They are taken once."""
    history, other = History(), replace(RUNNING, id="batch_2")
    for batch, now in ((RUNNING, 1020), (RUNNING, 1079), (RUNNING, 1080), (other, 1020)):
        history.add(batch, DONE, now)
    assert history.collect(0) == [
        Gains(RUNNING, 1020, 60, DONE + DONE),
        Gains(RUNNING, 1080, 60, DONE),
        Gains(other, 1020, 60, DONE),
    ]
    assert history.collect(0) == []


def test_history_is_reported_at_intervals() -> None:
    """The first gain comes at once, the next ones after a while, and nothing without a gain."""
    history = History()
    assert not history.is_due(0)
    history.add(RUNNING, Progress(gpu_seconds=3.0), 1020)
    assert not history.is_due(0)
    history.add(RUNNING, DONE, 1020)
    assert history.is_due(0)
    history.collect(0)
    history.add(RUNNING, DONE, 1020)
    assert not history.is_due(REPORT_SECONDS - 1)
    assert history.is_due(REPORT_SECONDS)


async def test_a_batch_that_was_run_has_a_history(rig: Rig) -> None:
    """Its sums are those of the rows, over shards and over all that the worker did at its end."""
    work = rig.batch({}, {"status": 400}, {}, {}, shard_lines=2)
    begin = time.time()
    async with rig.worker():
        await until(lambda: work.is_done)
    buckets = rig.run(rig.deployment.ledger.list_history(work.id))
    progress = rig.run(rig.deployment.table.get_shard_progress(work.batch)).done
    assert sum(bucket.completed for bucket in buckets) == progress.completed == 3
    assert sum(bucket.failed for bucket in buckets) == progress.failed == 1
    assert sum(bucket.tokens for bucket in buckets) == progress.completion_tokens > 0
    assert begin - 0.001 <= progress.first_row_at <= progress.last_row_at <= time.time() + 0.001
    assert progress.row_seconds == progress.last_row_at - progress.first_row_at
    starts = [bucket.start for bucket in buckets]
    assert starts == sorted(starts)
    assert {bucket.seconds for bucket in buckets} == {60}
    assert all(start % 60 == 0 for start in starts)


async def test_history_adds_up(rig: Rig) -> None:
    """Several workers add to one bucket; another batch's is its own."""
    ledger = rig.deployment.ledger
    work, other = rig.batch({}), rig.batch({})
    for _ in range(2):
        rig.run(ledger.add_history(work.batch, HistoryBucket(1020, 60, 3, 1, 12)))
    rig.run(ledger.add_history(work.batch, HistoryBucket(900, 60, 1)))
    rig.run(ledger.add_history(other.batch, HistoryBucket(1020, 60, 9)))
    assert rig.run(ledger.list_history(work.id)) == [
        HistoryBucket(900, 60, 1),
        HistoryBucket(1020, 60, 6, 2, 24),
    ]
