"""Metrics of Lambdas: each end, each abandoned shard and each row counts once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from pydantic_core import to_json

from tests.emulators import MODEL, Emulator
from tests.handler.emf import Line, lines_in, totals
from tests.handler.finalize.rig import Cloud, Drop, plenty
from tidemill.batch.progress_counts import Progress
from tidemill.batch.states import Status
from tidemill.handler.aws.queues import shard_message
from tidemill.handler.control.dead_letters import handle_dead_letter
from tidemill.handler.control.reaper import reap
from tidemill.handler.finalize.close import close_settled
from tidemill.handler.lifecycle.announce import announce
from tidemill.handler.lifecycle.finish import abandon

FULL = {"FailedEntryCount": 1, "Entries": [{"ErrorCode": "InternalFailure"}]}
Counted = Callable[[], list[Line]]


@pytest.fixture
def mini(ministack: Emulator, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    """Return a separate deployment, in the process of the control Lambda."""
    monkeypatch.setenv("POWERTOOLS_SERVICE_NAME", "control")
    return Cloud.on(ministack)


@pytest.fixture
def counted(capsys: pytest.CaptureFixture[str]) -> Counted:
    """Return a function that returns the lines since its last call."""
    return lambda: lines_in(capsys.readouterr().out)


def ends(lines: list[Line]) -> list[tuple[dict[str, float], object]]:
    """Return the ends that were counted, and the status in the line."""
    return [(line.figures, line.labels["status"]) for line in lines if "status" in line.labels]


@pytest.mark.parametrize(
    ("outcome", "metric"),
    [
        (Status.COMPLETED, "BatchesCompleted"),
        (Status.FAILED, "BatchesFailed"),
        (Status.EXPIRED, "BatchesFailed"),
    ],
)
def test_an_end_is_counted_when_it_is_announced(
    mini: Cloud, counted: Counted, outcome: Status, metric: str
) -> None:
    """One run counts it, though all check again; its line names the batch."""
    drop = mini.drop(4).begin()
    drop.run_shard(0)
    drop.move(Status.FINALIZING, outcome=str(outcome)).finish()
    reap(mini.aws, mini.deployment, int(time.time()))
    lines = counted()
    assert ends(lines) == [({metric: 1}, str(outcome))]
    assert lines[-1].dimensions == {"service": "control", "model": MODEL}
    assert lines[-1].labels["batch_id"] == drop.id


def test_a_batch_that_was_cancelled_is_not_counted(mini: Cloud, counted: Counted) -> None:
    """It has neither failed nor done what it was made for."""
    mini.drop(4).begin().move(Status.CANCELLING).finish()
    assert counted() == []


def test_two_runs_that_tell_one_end_count_it_once(mini: Cloud, counted: Counted) -> None:
    """Both have read the batch before either announces it; its tenant's total has it once."""
    drop = mini.drop(4).move(Status.FAILED)
    stale = drop.batch
    for _ in range(2):
        mini.run(announce(mini.deployment, stale))
    assert ends(counted()) == [({"BatchesFailed": 1}, "failed")]
    total = mini.run(mini.deployment.ledger.get_total(stale.tenant))
    assert {status: number for status, number in total.batches.items() if number} == {"failed": 1}


def test_an_end_that_could_not_be_announced_is_counted_later(
    mini: Cloud, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reaper counts it when it publishes the event."""
    drop = mini.drop(4).move(Status.FAILED)
    with monkeypatch.context() as patch:
        patch.setattr(mini.aws.clients["events"], "put_events", lambda **_: FULL)
        mini.run(announce(mini.deployment, drop.batch))
    assert counted() == []
    monkeypatch.setenv("POWERTOOLS_SERVICE_NAME", "reaper")
    reap(mini.aws, mini.deployment, int(time.time()))
    [line] = counted()
    assert line.dimensions["service"] == "reaper"
    assert line.figures == {"BatchesFailed": 1}


def hopeless(cloud: Cloud) -> Drop:
    """Return a batch of one shard that was claimed too often without a new row."""
    drop = cloud.drop(4).begin()
    for _ in range(cloud.deployment.settings.max_attempts):
        drop.claim(0)
    return drop


def by_reaper(cloud: Cloud, _: Drop) -> None:
    """Let the schedule look."""
    reap(cloud.aws, cloud.deployment, int(time.time()))


def by_dead_letter(cloud: Cloud, drop: Drop) -> None:
    """Let the shard's message die."""
    body = to_json(shard_message(drop.id, 0)).decode()
    cloud.run(handle_dead_letter(cloud.deployment, body, int(time.time())))


WAYS = [by_reaper, by_dead_letter]


@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("second", WAYS)
def test_a_shard_that_is_given_up_is_counted_once(
    mini: Cloud,
    counted: Counted,
    first: Callable[[Cloud, Drop], None],
    second: Callable[[Cloud, Drop], None],
) -> None:
    """The run that gives it up first counts it; later runs see that it is abandoned."""
    drop = hopeless(mini)
    first(mini, drop)
    second(mini, drop)
    [line] = counted()
    assert line.figures == {"ShardsGivenUp": 1}
    assert line.labels == {"batch_id": drop.id, "shard": 0}


def test_two_who_give_a_shard_up_at_once_count_it_once(mini: Cloud, counted: Counted) -> None:
    """Both have seen that it is hopeless; the words of the first stay."""
    drop = hopeless(mini)
    for reason in ("first", "second"):
        mini.run(abandon(mini.deployment, drop.id, 0, reason, model=MODEL))
    assert [line.figures for line in counted()] == [{"ShardsGivenUp": 1}]
    assert drop.shard(0).abandoned == "first"


def closing(drop: Drop, cloud: Cloud) -> None:
    """Let finalize close the shards that were given up."""
    close_settled(cloud.aws, cloud.deployment, drop.batch, plenty)


def test_rows_that_finalize_makes_durable_are_counted_by_it(mini: Cloud, counted: Counted) -> None:
    """Rows that the table already knew are not counted, nor those that a second run finds done."""
    drop = mini.drop(4).begin()
    shard = drop.claim(0, lease_seconds=60)
    recorded = Progress(completed=1, prompt_tokens=10, cached_tokens=4, completion_tokens=3)
    drop.put_rows(shard, [1])
    mini.run(
        mini.deployment.table.renew(shard, lease_until=0, progress=recorded, attempts=1),
    )
    drop.put_rows(shard, [2], number=1)  # durable, and its worker died before it could tell
    mini.run(mini.deployment.table.abandon(drop.id, 0, "given up"))
    closing(drop, mini)
    closing(drop, mini)
    [line] = counted()
    final = drop.shard(0).progress
    assert (final.completed, final.failed) == (2, 2)
    assert line.figures["RowsCompleted"] == 1
    assert line.figures["RowsFailed"] == 2
    assert line.figures["PromptTokens"] == 10
    assert line.figures["GpuSeconds"] == 0


def test_rows_of_a_run_that_loses_the_shard_are_not_counted(
    mini: Cloud, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commit fails; the owner of the shard counts the rows."""
    drop = mini.drop(4).begin()
    drop.claim(0)
    mini.run(mini.deployment.table.abandon(drop.id, 0, "given up"))
    put = type(mini.deployment.bucket).put_segments

    def steal_first(*arguments: object) -> Iterator[object]:
        drop.cloud.run(
            drop.cloud.deployment.table.claim(
                drop.id, 0, owner="another", now=time.time(), lease_seconds=60, steal=True
            )
        )
        return put(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(type(mini.deployment.bucket), "put_segments", steal_first)
        closing(drop, mini)
    assert counted() == []
    later = time.time() + 120
    close_settled(mini.aws, mini.deployment, drop.batch, plenty, now=lambda: later)
    assert totals(counted())["RowsFailed"] == 4


def test_a_batch_is_counted_as_its_report_says(mini: Cloud, counted: Counted) -> None:
    """Over two owners of a shard, one of whom died, and a finalize that fills what is missing."""
    drop = mini.drop(8).begin()
    drop.claim(0, lease_seconds=-1)
    shard = drop.claim(1)
    drop.put_rows(shard, [5, 6])
    drop.move(Status.FINALIZING, ago_seconds=9, outcome="expired").finish()
    sums = totals(counted())
    counts = drop.report()["request_counts"]
    assert (sums["RowsCompleted"], sums["RowsFailed"]) == (counts["completed"], counts["failed"])
    assert replace(drop.progress, rows_per_second=0) == Progress(2, 0, 20, 8, 6)
    assert sums["BatchesFailed"] == 1
