"""Next step of a batch, in each of its states."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.emulators import MODEL, active_ids
from tests.handler.control.looking import look_at
from tests.handler.intake.rig import Cloud, lines_of, plenty, time_for
from tidemill.batch.fleet import OpenWork
from tidemill.batch.model import Batch, Shard
from tidemill.batch.progress_counts import Progress
from tidemill.batch.states import Status
from tidemill.handler.aws.queues import advance_message, intake_message
from tidemill.handler.control.advance import advance
from tidemill.handler.intake import intake, shards
from tidemill.handler.intake.control_messages import IntakeStep
from tidemill.handler.intake.work_units import run_unit
from tidemill.handler.lifecycle.announce import announce
from tidemill.handler.lifecycle.cancel import cancel


def go_on(
    cloud: Cloud, batch: Batch, time_left: Callable[[], float] = plenty, after: float = 0
) -> Batch:
    """Bring a batch forward, some seconds from now, and return it."""
    advance(cloud.aws, cloud.deployment, batch.id, time_left, now=lambda: time.time() + after)
    return cloud.batch(batch.id)


def finish(cloud: Cloud, batch: Batch, number: int) -> None:
    """Commit a shard without a row, as if all its lines had got theirs."""
    shard = cloud.claim(batch.id, number)
    commit = cloud.deployment.table.commit(
        shard, progress=Progress(completed=10), output_sizes=[], error_sizes=[]
    )
    cloud.run(commit)


def spend(cloud: Cloud, shard: Shard, *, gpu_seconds: float) -> None:
    """Tell of a shard in progress what GPU time it has taken."""
    progress = Progress(gpu_seconds=gpu_seconds)
    renew = cloud.deployment.table.renew
    cloud.run(renew(shard, lease_until=time.time() + 30, progress=progress, attempts=1))


def check(cloud: Cloud, batch: Batch) -> OpenWork | None:
    """Look at a batch as the reaper does; return its open work."""
    return look_at(cloud, batch, int(time.time()))


def test_a_new_batch_is_taken_in_and_rung_for(files: Cloud) -> None:
    """One run does everything if it has time."""
    batch = go_on(files, files.create(lines_of(25)))
    assert batch.status is Status.IN_PROGRESS
    assert batch.shards_rung == 3
    assert files.rung_shards() == [0, 1, 2]


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["long", "packed"])
def test_a_file_that_may_take_long_is_left_to_others(
    files: Cloud, monkeypatch: pytest.MonkeyPatch, pack: Callable[[bytes], bytes]
) -> None:
    """So cancels do not wait behind it; the run that reads it sends the messages for its shards."""
    if pack is bytes:
        monkeypatch.setattr(intake, "SHORT_BYTES", 10)
    batch = go_on(files, files.create(pack(lines_of(25))))
    assert batch.status is Status.VALIDATING
    queue = files.deployment.intake
    assert files.messages(queue) == [intake_message(batch.id)]
    run_unit(files.aws, files.deployment, IntakeStep(batch.id), plenty)
    assert files.batch(batch.id).shards_rung == 3
    assert files.rung_shards() == [0, 1, 2]
    assert files.messages(queue) == []


def test_ringing_goes_on_where_it_stood(files: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """Near its deadline a run sends some messages, records how many, and requests another run."""
    monkeypatch.setattr(shards, "_RING_AT_ONCE", 20)
    batch = files.ingest(files.create(lines_of(450)))
    batch = go_on(files, batch, time_for(0))
    assert batch.shards_rung == 20
    assert files.rung_shards() == list(range(20))
    assert files.messages() == [advance_message(batch.id)]
    batch = go_on(files, batch)
    assert batch.shards_rung == 45
    assert files.rung_shards() == list(range(20, 45))
    assert files.messages() == []
    go_on(files, batch)
    assert files.rung_shards() == []


def test_a_batch_that_is_cancelled_meanwhile_is_rung_for_no_further(
    files: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that rings sees it when it notes how far it is."""
    monkeypatch.setattr(shards, "_RING_AT_ONCE", 1)
    batch = files.ingest(files.create(lines_of(30)))
    stale = files.batch(batch.id)
    files.run(cancel(files.deployment, batch.id, int(time.time())))
    shards.enqueue_shards(files.aws, files.deployment, stale, plenty)
    assert files.rung_shards() == [0]


def test_a_model_that_is_no_longer_served_gets_no_messages(files: Cloud) -> None:
    """The batch waits: for the model, or for the end of its window."""
    batch = files.ingest(files.create(lines_of(3)))
    cloud = files.having(work_queues={})
    assert go_on(cloud, batch).status is Status.IN_PROGRESS
    assert go_on(cloud, batch, after=25 * 3600).status is Status.EXPIRED


def test_a_batch_with_all_shards_done_completes(files: Cloud) -> None:
    """It winds up and ends in the same run, even if its window is over by then."""
    batch = go_on(files, files.create(lines_of(20)))
    for number in range(2):
        assert go_on(files, batch).status is Status.IN_PROGRESS
        finish(files, batch, number)
    batch = go_on(files, batch, after=25 * 3600)
    assert batch.status is Status.COMPLETED
    assert batch.outcome is Status.COMPLETED
    assert batch.announced is Status.COMPLETED
    assert files.run(active_ids(files.deployment.table)) == []


def test_a_window_that_ends_before_the_file_is_read(files: Cloud) -> None:
    """The batch expires in its current state."""
    batch = go_on(files, files.create(lines_of(3)), after=25 * 3600)
    assert batch.status is Status.EXPIRED
    assert files.has_object(batch.outputs.report_key)


def test_a_window_that_ends_while_shards_are_left(files: Cloud) -> None:
    """Lines that were not run get a row with the reason."""
    batch = go_on(files, files.create(lines_of(20)))
    finish(files, batch, 0)
    batch = go_on(files, batch, after=25 * 3600)
    assert batch.status is Status.EXPIRED
    errors = files.run(files.deployment.bucket.get(batch.outputs.error_key))
    assert errors.count(b"batch_expired") == 10


def test_a_batch_that_has_cost_all_it_may_expires(files: Cloud) -> None:
    """Its rows are there, other lines have a row with the reason, and no worker is requested."""
    cloud = files.having(gpu_hour_prices={MODEL: 3.6})
    batch = go_on(cloud, cloud.create(lines_of(20), metadata={"max-cost": "0.5"}))
    spend(cloud, cloud.claim(batch.id, 0), gpu_seconds=499.0)
    assert check(cloud, batch) is not None
    assert go_on(cloud, batch).status is Status.IN_PROGRESS
    spend(cloud, cloud.claim(batch.id, 1), gpu_seconds=1.0)
    assert check(cloud, batch) is None
    assert cloud.messages()[-1] == advance_message(batch.id)
    batch = go_on(cloud, batch)
    assert batch.status is Status.FINALIZING
    batch = go_on(cloud, batch, after=60)
    assert batch.status is Status.EXPIRED
    (error,) = batch.errors
    assert (error.code, error.param) == ("max_cost_reached", "max_cost")
    assert "0.5" in error.message
    errors = cloud.run(cloud.deployment.bucket.get(batch.outputs.error_key))
    assert errors.count(b"reached its `max_cost`") == 20


def test_a_cost_limit_requires_a_price(files: Cloud) -> None:
    """The batch fails before anything runs, and its error names the missing price."""
    batch = go_on(files, files.create(lines_of(20), metadata={"max-cost": "0.5"}))
    assert batch.status is Status.FAILED
    (error,) = batch.errors
    assert (error.code, error.param) == ("no_gpu_hour_price", "max_cost")
    assert "gpu_hour_price" in error.message


def test_a_shard_that_was_given_up_is_closed(files: Cloud) -> None:
    """Its lines get an error row, and the batch comes to its end."""
    batch = go_on(files, files.create(lines_of(20)))
    finish(files, batch, 0)
    files.claim(batch.id, 1, lease_seconds=-1)
    files.run(files.deployment.table.abandon(batch.id, 1, "tried too often"))
    go_on(files, batch)
    assert files.messages() == [advance_message(batch.id)]
    batch = go_on(files, batch)
    assert batch.status is Status.COMPLETED
    errors = files.run(files.deployment.bucket.get(batch.outputs.error_key))
    assert errors.count(b"tried too often") == 10


def test_a_cancelled_batch_is_brought_to_its_end(files: Cloud) -> None:
    """Shards that a worker holds are awaited or taken over, then the batch is cancelled."""
    batch = go_on(files, files.create(lines_of(20)))
    files.claim(batch.id)
    files.run(cancel(files.deployment, batch.id, int(time.time())))
    assert go_on(files, batch).status is Status.CANCELLING
    assert go_on(files, batch, after=30).status is Status.CANCELLED


def test_a_status_without_an_announcement_is_announced(files: Cloud) -> None:
    """It repairs the death of a run between the move and the event, also at the end."""
    batch, table = files.create(lines_of(3)), files.deployment.table
    files.run(announce(files.deployment, batch))
    files.run(table.move_batch(batch.id, Status.FAILED, 1))
    assert files.batch(batch.id).announced is Status.VALIDATING
    assert go_on(files, batch).announced is Status.FAILED
    assert files.run(active_ids(table)) == []


def test_a_batch_that_does_not_exist_is_forgotten(files: Cloud) -> None:
    """The message was a mistake or came too late."""
    advance(files.aws, files.deployment, "batch_unknown", plenty)
    assert files.run(files.deployment.table.get_batch("batch_unknown")) is None


def test_coming_again_changes_nothing(files: Cloud) -> None:
    """Messages are doorbells: the second one finds the work done."""
    batch = go_on(files, files.create(lines_of(3)))
    assert replace(go_on(files, batch), turn_until=0) == replace(batch, turn_until=0)
    assert batch.model == MODEL
