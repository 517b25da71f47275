"""Cancelling a batch, in each of its states."""

from __future__ import annotations

import time

import pytest

from tests.emulators import active_ids
from tests.handler.intake.rig import Cloud, lines_of
from tidemill.batch.model import Batch
from tidemill.batch.states import TERMINAL, Status
from tidemill.handler.aws.queues import advance_message
from tidemill.handler.lifecycle.cancel import NotCancellable, cancel


def cancelled(cloud: Cloud, batch_id: str) -> Batch | None:
    """Cancel a batch and return it."""
    return cloud.run(cancel(cloud.deployment, batch_id, int(time.time())))


def move(cloud: Cloud, batch: Batch, *statuses: Status) -> None:
    """Bring a batch to a status by its moves."""
    for status in statuses:
        assert cloud.run(cloud.deployment.table.move_batch(batch.id, status, 1)).is_there


def test_a_file_that_is_validated_is_cancelled_at_once(files: Cloud) -> None:
    """No line was run, which its report shows."""
    batch = files.create(lines_of(3))
    done = cancelled(files, batch.id)
    assert done is not None
    assert done.status is Status.CANCELLED
    assert done.cancelling_at is not None
    assert files.has_object(batch.outputs.report_key)
    assert files.run(active_ids(files.deployment.table)) == []
    assert cancelled(files, batch.id) == files.batch(batch.id)


def test_a_batch_of_which_nothing_was_run_is_cancelled_at_once(files: Cloud) -> None:
    """Its shards have messages, but none is claimed."""
    batch = files.ingest(files.create(lines_of(30)))
    done = cancelled(files, batch.id)
    assert done is not None
    assert done.status is Status.CANCELLED


def test_a_batch_that_runs_winds_up(files: Cloud) -> None:
    """It is cancelling until its finished rows are published; repeating changes nothing."""
    batch = files.ingest(files.create(lines_of(30)))
    files.claim(batch.id, 1)
    for _ in range(2):
        done = cancelled(files, batch.id)
        assert done is not None
        assert done.status is Status.CANCELLING
        assert files.batch(batch.id).announced is Status.CANCELLING
        assert files.messages() == [advance_message(batch.id)]


def test_what_is_all_done_is_not_cancelled(files: Cloud) -> None:
    """A batch that publishes its rows goes on with it."""
    batch = files.create(lines_of(3))
    move(files, batch, Status.IN_PROGRESS, Status.FINALIZING)
    with pytest.raises(NotCancellable, match="rows are all done"):
        cancelled(files, batch.id)
    assert files.batch(batch.id).status is Status.FINALIZING


@pytest.mark.parametrize("status", sorted(TERMINAL - {Status.CANCELLED}))
def test_a_batch_that_has_ended_is_not_cancelled(files: Cloud, status: Status) -> None:
    """The error says how it ended."""
    batch = files.create(lines_of(3))
    between = {Status.COMPLETED: (Status.IN_PROGRESS, Status.FINALIZING)}.get(status, ())
    move(files, batch, *between, status)
    with pytest.raises(NotCancellable, match=f"it is {status}"):
        cancelled(files, batch.id)
    assert files.batch(batch.id).status is status


def test_a_batch_that_does_not_exist(files: Cloud) -> None:
    """There is nothing to cancel and nothing is made."""
    assert cancelled(files, "batch_unknown") is None
    assert files.run(files.deployment.table.get_batch("batch_unknown")) is None


def test_a_very_large_batch_winds_up_as_if_it_had_run(
    files: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checking all its shards would take longer than a request may."""
    monkeypatch.setattr("tidemill.handler.lifecycle.cancel._MAX_SHARDS_LOOKED_AT", 2)
    batch = files.ingest(files.create(lines_of(30)))
    done = cancelled(files, batch.id)
    assert done is not None
    assert done.status is Status.CANCELLING
    assert files.messages() == [advance_message(batch.id)]
