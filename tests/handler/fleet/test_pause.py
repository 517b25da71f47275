"""Spent GPU hours of a day: waiting batches show the reason, and continue the next day."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.emulators import Emulator
from tests.handler.control.looking import look_at
from tests.handler.emf import lines_in, totals
from tests.handler.intake.rig import Cloud, lines_of, plenty
from tidemill.batch.fleet import OpenWork
from tidemill.batch.model import Batch
from tidemill.handler.aws.calls import Operation
from tidemill.handler.aws.queues import Queue
from tidemill.handler.aws.stores.usage import DAY_SECONDS, EVERYBODY
from tidemill.handler.control.advance import advance
from tidemill.handler.control.reaper import reap
from tidemill.handler.deployment import Deployment
from tidemill.handler.fleet.waiting_reason import get_waiting_reason
from tidemill.handler.settings import Limits

NOW = int(time.time())
MIDNIGHT = NOW - NOW % DAY_SECONDS + DAY_SECONDS


@pytest.fixture
def mini(ministack: Emulator) -> Cloud:
    """Return a deployment whose batches have three days."""
    return Cloud.on(ministack, default_window="3d", shard_lines="10")


def spend(cloud: Cloud, hours: float, tenant: str = "default", now: int = NOW) -> None:
    """Add GPU time to a day as workers do."""
    for each in (tenant, EVERYBODY):
        cloud.run(cloud.deployment.usage.add_gpu_seconds(each, hours * 3600, now))


def look(cloud: Cloud, batch: Batch, now: int = NOW) -> OpenWork | None:
    """Let the reaper look at a batch and return its open work."""
    return look_at(cloud, batch, now)


def code(cloud: Cloud, batch: Batch, now: int = NOW) -> str | None:
    """Return why a batch waits."""
    why = cloud.run(get_waiting_reason(cloud.deployment, cloud.batch(batch.id), now))
    return why and why.code


def test_a_tenant_waits_for_the_next_day(mini: Cloud) -> None:
    """No worker is wanted for its lines, nor are they rung for; others' are."""
    cloud = mini.having(limits=Limits(gpu_hours_per_day=2))
    batch = cloud.ingest(cloud.create(lines_of(25)))
    advance(cloud.aws, cloud.deployment, batch.id, plenty)
    spend(cloud, 1.9)
    spend(cloud, 5, "other")
    assert look(cloud, batch)
    assert code(cloud, batch) is None
    spend(cloud, 0.2)
    cloud.rung_shards()
    assert look(cloud, batch) is None
    assert cloud.rung_shards() == []
    pause = cloud.batch(batch.id).pause
    assert pause is not None
    assert (pause.code, pause.since, pause.until) == ("gpu_hours_used_up", NOW, MIDNIGHT)
    assert pause.message == (
        "The tenant's limit of 2 GPU hours per day is used up. Waiting lines run from 00:00 UTC on."
    )
    assert look(cloud, batch, NOW + 1) is None
    assert cloud.batch(batch.id).pause == pause
    assert code(cloud, batch) == "gpu_hours_used_up"
    assert code(cloud, batch, MIDNIGHT) is None
    assert look(cloud, batch, MIDNIGHT)
    assert cloud.rung_shards() == [0, 1, 2]


def test_a_raised_limit_ends_the_pause(mini: Cloud) -> None:
    """The reaper's next run ends it."""
    cloud = mini.having(limits=Limits(gpu_hours_per_day=1))
    batch = cloud.ingest(cloud.create(lines_of(25)))
    spend(cloud, 1)
    look(cloud, batch)
    assert code(cloud, batch) == "gpu_hours_used_up"
    assert look(mini, batch)
    assert cloud.batch(batch.id).pause is None


def test_a_spent_budget_starts_no_worker_and_raises_the_alarm(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No worker is started for running batches, nor for one that is only being validated."""
    started: list[str] = []

    def note(_deployment: Deployment, work: OpenWork, _now: int) -> Operation[None]:
        started.append(work.batch_id)
        return
        yield

    monkeypatch.setattr("tidemill.handler.intake.shards.scale_for_batch", note)
    cloud = mini.having(gpu_hours_per_day=1, fleets="/fleets")
    first, second = (cloud.ingest(cloud.create(lines_of(5), f"input/{n}.jsonl")) for n in "ab")
    advance(cloud.aws, cloud.deployment, first.id, plenty)
    reap(cloud.aws, cloud.deployment, NOW)
    assert "BudgetSpent" not in totals(lines_in(capsys.readouterr().out))
    now = int(time.time())  # of the clock that the intake reads, which may be behind midnight
    spend(cloud, 0.5, "other", now)
    spend(cloud, 0.5, now=now)
    advance(cloud.aws, cloud.deployment, second.id, plenty)
    assert started == [first.id]
    assert code(cloud, second) == "budget_used_up"
    reap(cloud.aws, cloud.deployment, now)
    assert totals(lines_in(capsys.readouterr().out))["BudgetSpent"] == 1
    assert code(cloud, first) == "budget_used_up"


def test_a_pause_is_written_before_any_shard_is_rung_for(
    mini: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that polls for others has the message at once, and looks for the pause once."""
    cloud = mini.having(gpu_hours_per_day=1, fleets="/fleets")
    batch = cloud.ingest(cloud.create(lines_of(5)))
    spend(cloud, 1, now=int(time.time()))
    found: list[str | None] = []
    send_all = Queue.send_all

    def note(queue: Queue, *arguments: Any, **options: Any) -> Operation[None]:
        found.append(code(cloud, batch, int(time.time())))
        yield from send_all(queue, *arguments, **options)

    monkeypatch.setattr(Queue, "send_all", note)
    advance(cloud.aws, cloud.deployment, batch.id, plenty)
    assert found == ["budget_used_up"]


def test_a_batch_that_expires_while_it_waits_says_why(mini: Cloud) -> None:
    """Its errors have the reason, as for a batch without a machine."""
    cloud = mini.having(gpu_hours_per_day=1, fleets="/fleets")
    batch = cloud.ingest(cloud.create(lines_of(5), metadata={"completion-window": "30m"}))
    spend(cloud, 1)
    look(cloud, batch)
    late = batch.expires_at + 1
    change = cloud.deployment.table.change_batch
    pause = cloud.batch(batch.id).pause
    assert pause is not None
    shown = {"code": pause.code, "message": pause.message, "since": NOW, "until": late + 60}
    cloud.run(change(batch.id, batch.status, pause=shown, shards_rung=1))
    advance(cloud.aws, cloud.deployment, batch.id, plenty, now=lambda: late)
    assert [error.code for error in cloud.batch(batch.id).errors] == ["budget_used_up"]
