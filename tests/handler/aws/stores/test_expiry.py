"""Expiry of table items: TTL deletes late, so an expired item already counts as absent."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from tests.emulators import active_ids
from tests.handler.aws.conftest import Run
from tests.handler.aws.given import NOW, make_batch
from tidemill.batch.model import Batch, Shard
from tidemill.batch.progress import ShardProgress
from tidemill.batch.progress_counts import Progress
from tidemill.batch.stored_file import File
from tidemill.handler.aws.calls import Call, Operation
from tidemill.handler.aws.items import from_item, to_item
from tidemill.handler.aws.stores.drops import Arrival
from tidemill.handler.aws.stores.live import count_key, counting, live_item
from tidemill.handler.aws.stores.table import active_name
from tidemill.handler.deployment import Deployment

DAY_SECONDS = 86_400
DONE = Progress(completed=10)
PAST = int(time.time()) - 1
FUTURE = int(time.time()) + DAY_SECONDS


def stored(deployment: Deployment, pk: str, sk: str = "META") -> Operation[dict[str, Any]]:
    """Return an item as DynamoDB has it, whatever its age."""
    key = to_item({"pk": pk, "sk": sk})
    arguments = {"TableName": deployment.table.name, "Key": key, "ConsistentRead": True}
    response = yield Call("dynamodb", "get_item", arguments)
    return from_item(response["Item"])


def one_call(method: str, arguments: dict[str, Any]) -> Operation[None]:
    """Send one call to the table, unchanged."""
    yield Call("dynamodb", method, arguments)


def shard_of(batch: Batch, number: int, expires: int | None) -> Shard:
    """Return a shard of a batch with that expiry."""
    return Shard(batch.id, number, 1, 10, 0, 100, expires=expires)


def test_a_batch_is_known_until_it_expires(run: Run, deployment: Deployment) -> None:
    """From that second on it is not there, though the item still is."""
    table = deployment.table
    young, old = make_batch(deployment, expires=FUTURE), make_batch(deployment, expires=PAST)
    for batch in (young, old):
        run(table.create_batch(batch))
    assert run(table.get_batch(young.id)) == young
    assert run(table.get_batch(old.id)) is None
    assert run(stored(deployment, f"BATCH#{old.id}"))["expires"] == PAST


def test_a_batch_that_never_expires_has_no_such_attribute(run: Run, deployment: Deployment) -> None:
    """Batches of before the setting are kept; the list of active ones is kept always."""
    batch = make_batch(deployment)
    run(deployment.table.create_batch(batch))
    run(deployment.table.create_batch(make_batch(deployment, expires=FUTURE)))
    assert "expires" not in run(stored(deployment, f"BATCH#{batch.id}"))
    assert "expires" not in run(stored(deployment, "ACTIVE", active_name(batch)))


def test_shards_expire(run: Run, deployment: Deployment) -> None:
    """Each by itself: none is listed or found any more."""
    table = deployment.table
    batch = run(table.create_batch(make_batch(deployment, expires=FUTURE)))
    for number, expires in enumerate((FUTURE, PAST, None)):
        run(table.put_shard(shard_of(batch, number, expires)))
    assert [shard.number for shard in run(table.list_shards(batch.id))] == [0, 2]
    assert run(table.get_shard(batch.id, 1)) is None


def test_a_file_expires(run: Run, deployment: Deployment) -> None:
    """It expires with the batch that created it."""
    for name, expires in (("young", FUTURE), ("old", PAST)):
        file = File(f"file-{name}", "t", "k", 5, NOW, "n", "batch_output", expires)
        run(deployment.files.put_file(file))
        found = run(deployment.files.get_file(file.id))
        assert found == (file if expires == FUTURE else None)


def test_an_expired_batch_does_not_block_its_name(run: Run, deployment: Deployment) -> None:
    """A batch of the same name starts from scratch, without shards of the previous one."""
    table = deployment.table
    old = make_batch(deployment, expires=PAST)
    run(table.create_batch(old))
    for number in (1, 0):
        run(table.put_shard(shard_of(old, number, PAST)))
        dead = replace(shard_of(old, number, PAST), fence=1, owner="a")
        item = {"TableName": table.name, "Item": to_item(live_item(dead))}
        run(one_call("put_item", item))
    count = {"TableName": table.name, "Key": to_item(count_key(dead)), **counting(dead, DONE)}
    run(one_call("update_item", count))
    new = replace(old, tenant="new", expires=FUTURE)
    assert run(table.create_batch(new)) == new
    assert run(table.list_shards(new.id)) == []
    shard = shard_of(new, 0, FUTURE)
    run(table.put_shard(shard))
    assert run(table.list_shards(new.id)) == [shard]
    mine = run(table.claim(new.id, 0, owner="b", now=NOW, lease_seconds=9))
    assert (mine.fence, mine.attempts) == (1, 1)
    run(table.commit(mine, progress=DONE, output_sizes=[], error_sizes=[]))
    assert run(table.get_shard_progress(new)) == ShardProgress(1, DONE, ())
    assert run(table.create_batch(old)) == new


def test_expired_batches_are_not_listed(run: Run, deployment: Deployment) -> None:
    """Pages are full all the same, and say truly whether more follow."""
    table, tenant = deployment.table, f"tenant-{time.time_ns()}"
    made = [
        make_batch(
            deployment,
            tenant=tenant,
            created_at=NOW - number,
            expires=PAST if number in {0, 2, 3, 5} else FUTURE,
        )
        for number in range(7)
    ]
    for batch in made:
        run(table.create_batch(batch))
    first, has_more = run(table.list_batches(tenant, limit=2))
    assert ([batch.id for batch in first], has_more) == ([made[1].id, made[4].id], True)
    rest, has_more = run(table.list_batches(tenant, limit=2, after=first[-1]))
    assert ([batch.id for batch in rest], has_more) == ([made[6].id], False)


@pytest.mark.parametrize(
    ("kept_days", "remembered_days"),
    [(2, 15), (90, 90)],
    ids=["longer than the batch", "as long as the batch"],
)
def test_an_upload_is_remembered_longer_than_its_events_can_come(
    kept_days: int, remembered_days: int, run: Run, deployment: Deployment
) -> None:
    """A queue keeps one for 14 days: it must not run the file again when the batch is forgotten."""
    now = int(time.time()) - 3 * DAY_SECONDS
    batch = make_batch(deployment, created_at=now, expires=now + kept_days * DAY_SECONDS)
    assert run(deployment.table.create_drop(batch, Arrival("0A", now))) == batch
    again = run(deployment.table.create_drop(batch, Arrival("0A", now)))
    assert again == (None if kept_days == 2 else batch)
    memory = run(stored(deployment, f"DROP#{batch.source.bucket}/{batch.source.key}"))
    assert memory["expires"] == now + remembered_days * DAY_SECONDS
    assert run(active_ids(deployment.table)).count(batch.id) == 1


def test_a_memory_that_has_expired_stops_no_upload(run: Run, deployment: Deployment) -> None:
    """A new upload of an old key starts from scratch, without a predecessor."""
    old = make_batch(deployment, created_at=1_000_000, expires=PAST)
    new = make_batch(deployment, old.source.key, expires=FUTURE)
    create = deployment.table.create_drop
    run(create(old, Arrival("0F", 0)))
    assert run(deployment.table.newest_drop(old.source.bucket, old.outputs)) is None
    assert run(create(new, Arrival("0A", 0))) == new
    assert run(deployment.table.newest_drop(new.source.bucket, new.outputs)) == new.id
