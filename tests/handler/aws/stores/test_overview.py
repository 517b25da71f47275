"""Active work and ended batches of a tenant, without those of other tenants."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest

from tests.handler.aws.conftest import Run
from tests.handler.aws.given import LEASE_SECONDS, NOW, in_progress, make_batch
from tidemill.batch.month import ModelUse
from tidemill.batch.progress_counts import Progress
from tidemill.batch.states import TERMINAL, Status
from tidemill.handler.aws.calls import RETRY_DELAYS_SECONDS, Call, Operation
from tidemill.handler.aws.items import to_item
from tidemill.handler.deployment import Deployment
from tidemill.handler.errors import AwsError

DONE = Progress(7, 1, 70, 20, 21, 0.1, 2.0, 6.0, 1.5, 20.0, 0.5, 5)


def test_active_batches_are_those_of_the_tenant(run: Run, deployment: Deployment) -> None:
    """Batches that have not ended, oldest first, without those of a tenant with a similar name."""
    table, tenant = deployment.table, new_tenant()
    ages = (30, 10, 20)
    ours = [
        run(table.create_batch(make_batch(deployment, created_at=NOW - age, tenant=tenant)))
        for age in ages
    ]
    run(table.create_batch(make_batch(deployment, tenant=f"{tenant}-others")))
    ended = run(table.create_batch(make_batch(deployment, tenant=tenant)))
    run(table.move_batch(ended.id, Status.FAILED, NOW))
    found = run(deployment.overview.list_active(tenant))
    assert [batch.id for batch in found] == [ours[0].id, ours[2].id, ours[1].id]
    assert run(deployment.overview.list_active("unknown")) == []


def test_places_of_other_versions_are_read_as_far_as_known(
    run: Run, deployment: Deployment
) -> None:
    """A batch with too few fields has no place; the smaller place comes first."""
    tenant = new_tenant()
    batch = run(deployment.table.create_batch(make_batch(deployment, tenant=tenant)))
    place = (0, batch.expires_at, batch.created_at)
    assert run(deployment.overview.list_places(tenant)) == {batch.id: place}
    operation = deployment.overview.list_places("t")
    fields = {"a": [1, 2, 3, "later"], "b": [-1, 9, 9], "c": [1, 2], "d": [], "e": [0, 5, 6]}
    items = [to_item({"sk": f"t#{name}", "place": fields[name]}) for name in fields]
    items += [to_item({"sk": "t#f"}), to_item({"sk": "t#g", "place": [0, 0, 0], "expires": 1})]
    found = answered(operation, {"Items": items})
    assert sorted(found, key=found.__getitem__) == ["b", "e", "a"]


def test_two_pages_of_places_are_read(deployment: Deployment) -> None:
    """A tenant with tens of thousands of active batches does not slow its workers down."""
    operation = deployment.overview.list_places("t")
    pages = [
        {
            "Items": [to_item({"sk": f"t#{number}", "place": [0, 0, number]})],
            "LastEvaluatedKey": {"sk": {"S": f"t#{number}"}},
        }
        for number in range(2)
    ]
    assert [*answered(operation, *pages)] == ["0", "1"]


def answered(operation: Operation[Any], *responses: dict[str, Any]) -> Any:
    """Return the result of an operation whose reads, which may be old, get these responses."""
    call = next(operation)
    for response in responses:
        assert call.arguments["ConsistentRead"] is False
        try:
            call = operation.send(response)
        except StopIteration as end:
            return end.value
    raise AssertionError


def test_more_batches_than_one_call_takes_are_all_found(run: Run, deployment: Deployment) -> None:
    """A hundred keys are the most of one, and some may come back undone."""
    tenant = new_tenant()
    made = {
        run(
            deployment.table.create_batch(make_batch(deployment, created_at=NOW - n, tenant=tenant))
        ).id
        for n in range(102)
    }
    assert {batch.id for batch in run(deployment.overview.list_active(tenant))} == made


def test_unprocessed_keys_are_requested_again_after_a_while(deployment: Deployment) -> None:
    """The wait grows with each failed try, and the number of tries is limited."""
    keys = [{"pk": "a", "sk": "META"}, {"pk": "b", "sk": "META"}]
    operation = deployment.overview.get_many(keys)
    table = deployment.table.name

    def answer(num_left: int) -> Call:
        left = {table: {"Keys": [to_item(key) for key in keys[:num_left]]}}
        return operation.send({"Responses": {table: []}, "UnprocessedKeys": left})

    first = next(operation)
    assert (len(first.arguments["RequestItems"][table]["Keys"]), first.delay_seconds) == (2, 0)
    assert [answer(2).delay_seconds for _ in range(3)] == [0.05, 0.1, 0.2]
    again = answer(1)
    assert again.arguments["RequestItems"][table]["Keys"] == [to_item(keys[0])]
    assert again.delay_seconds == 0.05
    assert answer(1).delay_seconds == 0.1
    for _ in RETRY_DELAYS_SECONDS[2:]:
        answer(1)
    with pytest.raises(AwsError, match="1 items left out"):
        answer(1)


def test_a_standing_counts_waiting_and_running_shards(run: Run, deployment: Deployment) -> None:
    """A shard whose lease has lapsed is live but without an owner; a sealed one is neither."""
    table = deployment.table
    batch = run(in_progress(deployment, 4))
    for number, now in ((0, NOW), (1, NOW - 600), (2, NOW)):
        shard = run(table.claim(batch.id, number, owner="a", now=now, lease_seconds=LEASE_SECONDS))
        run(table.renew(shard, lease_until=now + 30, progress=DONE, attempts=1))
        if number == 2:
            run(table.commit(shard, progress=DONE.without_rates, output_sizes=[], error_sizes=[]))
    found = run(table.get_shard_progress(batch))
    assert found.progress(NOW) == DONE + DONE.without_rates + DONE.without_rates
    assert [shard.number for shard in found.live] == [0, 1]
    assert [shard.number for shard in found.leased(NOW)] == [0]
    assert (found.num_done, found.done) == (1, DONE.without_rates)
    assert run(table.count_left(batch)) == 3


def test_totals_add_up(run: Run, deployment: Deployment) -> None:
    """They are by tenant and status; a tenant without ended batches has none."""
    ledger, tenant = deployment.ledger, new_tenant()
    for status, owner, cost in (
        (Status.COMPLETED, tenant, 0.1),
        (Status.COMPLETED, tenant, 0.2),
        (Status.EXPIRED, tenant, None),
        (Status.FAILED, "others", 5.0),
    ):
        batch = make_batch(deployment, tenant=owner, status=status)
        uses = [ModelUse("m", 1, 7, gpu_seconds=0.1, cost=cost or 0.0)]
        run(written(deployment, ledger.counts_of_end(batch, DONE, uses, "2026-11")))
    assert run(ledger.list_month(tenant, "2026-11")) == [
        ModelUse("m", 3, 21, gpu_seconds=0.3, cost=0.3)
    ]
    assert run(ledger.list_month(tenant, "2026-10")) == []
    by_tenant = run(ledger.list_month_by_tenant("2026-11"))
    assert by_tenant[tenant] == ModelUse("", 3, 21, gpu_seconds=0.3, cost=0.3)
    assert run(ledger.list_month_by_tenant("2026-10")) == {}
    total = run(ledger.get_total(tenant))
    assert total.done == Progress(21, 3, 210, 60, 63, 0.3, audio_seconds=4.5, reasoning_tokens=15)
    assert total.cost == 0.3
    expected: dict[Any, int] = dict.fromkeys(TERMINAL, 0)
    assert total.batches == expected | {"completed": 2, "expired": 1}
    assert sum(run(ledger.get_total("unknown")).batches.values()) == 0


def written(deployment: Deployment, writes: list[dict[str, Any]]) -> Operation[None]:
    """Do all the writes."""
    yield deployment.table.transact(*writes)


def new_tenant() -> str:
    """Return a tenant that has nothing: the tests of this module share a deployment."""
    return f"tenant-{uuid4().hex}"


def one(call: Call) -> Any:
    """Return the operation that makes one call."""
    return (yield call)
