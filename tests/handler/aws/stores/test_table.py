"""The truth about batches and shards: every conditional write, and what a lost answer does."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from tests.emulators import active_ids
from tests.handler.aws.conftest import Run
from tests.handler.aws.given import LEASE_SECONDS, NOW, claimed, in_progress, make_batch
from tidemill.batch.model import BatchError, EngineInfo, Shard, ShardStatus
from tidemill.batch.progress import ShardProgress
from tidemill.batch.progress_counts import Progress
from tidemill.batch.states import MOVES, Status
from tidemill.batch.stored_file import File
from tidemill.handler.aws.calls import Call, Operation, T
from tidemill.handler.aws.stores.drops import Arrival
from tidemill.handler.aws.stores.table import MoveResult, active_name
from tidemill.handler.deployment import Deployment
from tidemill.handler.errors import AwsError, ConditionFailed, LeaseLost

PROGRESS = Progress(7, 3, 70, 7, 21, 1.25, 0.5)
LATER = NOW + LEASE_SECONDS + 1


def sent_twice(operation: Operation[T]) -> Operation[T]:
    """Send each call a second time, as a client does whose first answer was lost."""
    try:
        call = next(operation)
        while True:
            try:
                yield call
                response = yield call
            except AwsError as exc:
                call = operation.throw(exc)
            else:
                call = operation.send(response)
    except StopIteration as stop:
        result: T = stop.value
        return result


def test_a_batch_comes_back_as_it_was(run: Run, deployment: Deployment) -> None:
    """Every field survives the table: times, errors, nulls, empty and nested values."""
    batch = make_batch(
        deployment,
        model="m",
        errors=(BatchError("invalid_json_line", "Wörter", None, 7), BatchError("x", "y", "p")),
        engine=EngineInfo("r1", "1.0"),
        final=PROGRESS,
        turn_until=1.5,
        outcome=Status.EXPIRED,
    )
    assert run(deployment.table.create_batch(batch)) == batch
    assert run(deployment.table.get_batch(batch.id)) == batch
    assert batch.id in run(active_ids(deployment.table))


def test_a_batch_is_created_once(run: Run, deployment: Deployment) -> None:
    """The second caller gets the batch that the first has created, whatever its own values."""
    batch = make_batch(deployment)
    run(deployment.table.create_batch(batch))
    other = replace(batch, tenant="other tenant")
    assert run(deployment.table.create_batch(other)) == batch


def test_a_created_batch_whose_answer_was_lost_is_returned(
    run: Run, deployment: Deployment
) -> None:
    """The repetition meets its own work and takes it for success."""
    batch = make_batch(deployment)
    assert run(sent_twice(deployment.table.create_batch(batch))) == batch
    drop = make_batch(deployment)
    assert run(sent_twice(deployment.table.create_drop(drop, Arrival("0A", NOW)))) == drop


def test_an_unknown_batch_is_none(run: Run, deployment: Deployment) -> None:
    """Neither reading nor moving nor setting a field makes one."""
    assert run(deployment.table.get_batch("batch_none")) is None
    assert run(deployment.table.move_batch("batch_none", Status.FAILED, NOW)) == (None, False)
    assert run(deployment.table.set_once("batch_none", "ended_at", NOW)) is None
    assert run(deployment.table.get_batch("batch_none")) is None


@pytest.mark.parametrize("source", Status)
def test_only_allowed_moves_happen(source: Status, run: Run, deployment: Deployment) -> None:
    """Every pair of statuses is tried: the table allows exactly what `MOVES` allows."""
    for target in Status:
        if target is Status.VALIDATING:
            continue
        batch = make_batch(deployment, status=source)
        run(deployment.table.create_batch(batch))
        moved = run(deployment.table.move_batch(batch.id, target, NOW + 5, model="changed"))
        now = run(deployment.table.get_batch(batch.id))
        if target in MOVES[source]:
            assert now == replace(batch.moved(target, NOW + 5), model="changed")
            assert moved == (now, True)
        else:
            assert now == batch
            assert moved == (batch, target is source)


def test_uploads_of_one_key_are_put_in_order(run: Run, deployment: Deployment) -> None:
    """A repeated event finds its batch, an older one is overtaken, a newer one knows its elder."""
    first = make_batch(deployment)
    key = first.source.key
    second = make_batch(deployment, key)
    create = deployment.table.create_drop
    assert run(create(first, Arrival("0055", NOW))) == first
    assert run(create(first, Arrival("0055", NOW))) == first
    assert run(create(make_batch(deployment, key), Arrival("0054FF", NOW + 1))) is None
    made = run(create(second, Arrival("0055A", NOW)))
    assert made == replace(second, predecessor=first.id)
    assert run(deployment.table.newest_drop(first.source.bucket, first.outputs)) == second.id
    assert run(deployment.table.get_batch(first.id)) == first


def test_a_shard_is_planned_once(run: Run, deployment: Deployment) -> None:
    """A second intake cannot put a shard back that is done by then."""
    shard = run(claimed(deployment))
    run(deployment.table.put_shard(Shard(shard.batch_id, 0, 1, 10, 0, 100)))
    assert run(deployment.table.get_shard(shard.batch_id, 0)) == shard


def test_one_of_two_claims_wins(run: Run, deployment: Deployment) -> None:
    """The loser learns the owner and the lease; a missing shard cannot be claimed."""
    batch = run(in_progress(deployment))
    claim = deployment.table.claim
    mine = run(claim(batch.id, 0, owner="a", now=NOW, lease_seconds=LEASE_SECONDS))
    assert (mine.owner, mine.fence, mine.attempts) == ("a", 1, 1)
    assert mine.lease_until == NOW + LEASE_SECONDS
    with pytest.raises(ConditionFailed) as caught:
        run(claim(batch.id, 0, owner="b", now=NOW + 1, lease_seconds=LEASE_SECONDS))
    assert caught.value.item is not None
    assert caught.value.item["owner"] == "a"
    with pytest.raises(ConditionFailed):
        run(claim(batch.id, 9, owner="b", now=NOW, lease_seconds=LEASE_SECONDS))
    assert run(deployment.table.get_shard(batch.id, 9)) is None


def test_a_claim_whose_answer_was_lost_is_one_claim(run: Run, deployment: Deployment) -> None:
    """The repetition finds its own name and the fence that it has got."""
    batch = run(in_progress(deployment))
    claim = deployment.table.claim(batch.id, 0, owner="a", now=NOW, lease_seconds=LEASE_SECONDS)
    mine = run(sent_twice(claim))
    assert mine == run(deployment.table.get_shard(batch.id, 0))
    assert mine.fence == 1


def test_a_lapsed_or_stolen_shard_has_a_new_fence(run: Run, deployment: Deployment) -> None:
    """Later writes of the older owner are refused, and change nothing."""
    old = run(claimed(deployment))
    claim = deployment.table.claim
    new = run(claim(old.batch_id, 0, owner="b", now=LATER, lease_seconds=LEASE_SECONDS))
    newest = run(
        claim(old.batch_id, 0, owner="c", now=LATER, lease_seconds=LEASE_SECONDS, steal=True)
    )
    assert (new.fence, newest.fence) == (2, 3)
    for owner in (old, new):
        for write in (
            deployment.table.renew(owner, lease_until=LATER, progress=PROGRESS, attempts=0),
            deployment.table.release(
                owner, progress=PROGRESS, suspects=(), quarantined=(), attempts=0
            ),
            deployment.table.commit(owner, progress=PROGRESS, output_sizes=[1], error_sizes=[]),
        ):
            with pytest.raises(LeaseLost):
                run(write)
    assert run(deployment.table.get_shard(old.batch_id, 0)) == newest
    batch = run(deployment.table.get_batch(old.batch_id))
    assert batch is not None
    assert run(deployment.table.count_left(batch)) == 1


def test_renewing_and_releasing_tell_how_far_a_shard_is(run: Run, deployment: Deployment) -> None:
    """A renewal keeps the lease, a release gives it up and leaves what is known of the lines."""
    mine = run(claimed(deployment))
    run(sent_twice(deployment.table.renew(mine, lease_until=LATER, progress=PROGRESS, attempts=0)))
    kept = run(deployment.table.get_shard(mine.batch_id, 0))
    assert kept == replace(mine, lease_until=LATER, progress=PROGRESS, attempts=0)
    run(
        deployment.table.release(
            mine, progress=PROGRESS, suspects=((1, 2), (3,)), quarantined=(4,), attempts=2
        )
    )
    free = run(deployment.table.get_shard(mine.batch_id, 0))
    assert free == replace(
        mine,
        owner=None,
        lease_until=0.0,
        progress=PROGRESS,
        suspects=((1, 2), (3,)),
        quarantined=(4,),
        attempts=2,
    )


def test_a_commit_counts_once(run: Run, deployment: Deployment) -> None:
    """Sent twice, and by hand once more: the shard is done and its batch has one shard less."""
    mine = run(claimed(deployment, number=1))
    for commit in (sent_twice, lambda operation: operation):
        run(
            commit(
                deployment.table.commit(
                    mine, progress=PROGRESS, output_sizes=[5, 6], error_sizes=[7]
                )
            )
        )
    done = run(deployment.table.get_shard(mine.batch_id, 1))
    batch = run(deployment.table.get_batch(mine.batch_id))
    assert done == replace(
        mine,
        status=ShardStatus.DONE,
        owner=None,
        lease_until=0.0,
        attempts=0,
        progress=PROGRESS,
        output_sizes=(5, 6),
        error_sizes=(7,),
    )
    assert batch is not None
    assert run(deployment.table.get_shard_progress(batch)) == ShardProgress(
        1, PROGRESS.without_rates, ()
    )
    assert run(deployment.table.count_left(batch)) == 1


def test_a_done_shard_stays_as_it_is(run: Run, deployment: Deployment) -> None:
    """It can be neither claimed, stolen, abandoned nor planned again."""
    mine = run(claimed(deployment))
    run(deployment.table.commit(mine, progress=PROGRESS, output_sizes=[], error_sizes=[]))
    done = run(deployment.table.get_shard(mine.batch_id, 0))
    for steal in (False, True):
        with pytest.raises(ConditionFailed):
            run(
                deployment.table.claim(
                    mine.batch_id, 0, owner="b", now=LATER, lease_seconds=1, steal=steal
                )
            )
    assert run(deployment.table.abandon(mine.batch_id, 0, "why not")) is False
    run(deployment.table.put_shard(Shard(mine.batch_id, 0, 1, 10, 0, 100)))
    assert run(deployment.table.get_shard(mine.batch_id, 0)) == done


def test_an_abandoned_shard_says_why(run: Run, deployment: Deployment) -> None:
    """The reason is stored in addition to the shard's other attributes."""
    mine = run(claimed(deployment))
    assert run(deployment.table.abandon(mine.batch_id, 0, "it never ends")) is True
    assert run(deployment.table.abandon(mine.batch_id, 0, "says another")) is False
    found = run(deployment.table.get_shard(mine.batch_id, 0))
    assert found == replace(mine, abandoned="it never ends")


def test_shards_are_listed_over_pages(run: Run, deployment: Deployment) -> None:
    """More of them than one page of a query holds: all are listed, in order."""
    batch = run(deployment.table.create_batch(make_batch(deployment)))
    words = "x" * 60_000  # twenty of them are more than the 1 MB of a page
    for number in range(20):
        run(
            deployment.table.put_shard(
                Shard(batch.id, number, 1, 10, 0, 1, progress=PROGRESS, abandoned=words)
            )
        )
    run(deployment.table.claim(batch.id, 7, owner="a", now=NOW, lease_seconds=LEASE_SECONDS))
    shards = run(deployment.table.list_shards(batch.id))
    pages, first = [], 0
    while first is not None:
        page, first = run(deployment.table.list_shards_page(batch.id, first))
        pages.append(page)
    assert len(pages) > 1
    assert [shard for page in pages for shard in page] == shards
    assert [shard.fence for shard in shards] == [int(number == 7) for number in range(20)]
    assert run(deployment.table.list_shards_page(batch.id, 19)) == (shards[19:], None)
    assert run(deployment.table.list_shards_page(batch.id, 6, 2)) == (shards[6:8], 8)
    assert run(deployment.table.list_shards_page("batch_x")) == ([], None)
    assert [shard.number for shard in shards] == list(range(20))
    waiting = run(deployment.table.list_waiting(batch.id, {0, 18}, 17))
    assert waiting == [*range(1, 18)]
    assert run(deployment.table.list_waiting(batch.id, {*range(19)}, 5)) == [19]
    some = run(deployment.table.list_some_pending(batch.id, 17))
    assert some[:13] == [17, 18, 19, *range(10)]
    assert run(deployment.table.list_some_pending(batch.id, 0)) == [*range(20)]
    operation = deployment.table.list_some_pending(batch.id, 17)
    name = {"sk": {"S": "SHARD#0000017"}}
    page = {"Items": [name], "LastEvaluatedKey": name}
    assert "ConsistentRead" not in next(operation).arguments
    bounds = operation.send(page).arguments["ExpressionAttributeValues"]
    assert bounds[":first"] == {"S": "SHARD#0000018"}
    with pytest.raises(StopIteration, match="17, 17"):  # the third page is not read
        operation.send(page)


def test_live_shards_are_counted_over_pages(run: Run, deployment: Deployment) -> None:
    """More shards than fit on one page of a query are all counted, abandoned ones as such."""
    table = deployment.table
    batch = run(in_progress(deployment, 20))
    for number in range(20):
        run(table.claim(batch.id, number, owner="a", now=NOW, lease_seconds=LEASE_SECONDS))
        run(table.abandon(batch.id, number, "x" * 60_000))
    found = run(table.get_shard_progress(batch)).live
    assert [(live.number, live.fence, live.is_given_up) for live in found] == [
        (number, 1, True) for number in range(20)
    ]


def test_what_is_counted_twice_is_left_out_once(run: Run, deployment: Deployment) -> None:
    """A shard that is committed during the query counts among the finished ones only."""
    table = deployment.table
    batch = run(in_progress(deployment, 2))
    claim = table.claim
    mine = [
        run(claim(batch.id, number, owner="a", now=NOW, lease_seconds=LEASE_SECONDS))
        for number in range(2)
    ]
    run(table.renew(mine[0], lease_until=LATER, progress=PROGRESS, attempts=0))

    def committed_meanwhile() -> Operation[ShardProgress]:
        looking = table.get_shard_progress(batch)
        call = next(looking)
        before = yield call
        yield from table.commit(mine[0], progress=PROGRESS, output_sizes=[], error_sizes=[])
        after = yield call
        live = [item for item in before["Items"] if "state" in item]
        counts = [item for item in after["Items"] if "state" not in item]
        try:
            looking.send({"Items": [*live, *counts]})
        except StopIteration as stop:
            found: ShardProgress = stop.value
        return found

    found = run(committed_meanwhile())
    assert (found.num_done, [live.number for live in found.live]) == (1, [1])
    assert found.progress(NOW) == PROGRESS.without_rates


def test_a_shard_of_an_earlier_version_goes_on(run: Run, deployment: Deployment) -> None:
    """Its item counts, lease included, until a worker claims it; then it is live."""
    table, batch = deployment.table, run(in_progress(deployment, 0))
    old = replace(
        Shard(batch.id, 0, 1, 10, 0, 100, owner="old", lease_until=NOW + 5, fence=3, attempts=2),
        suspects=((1,),),
        progress=PROGRESS,
    )
    run(table.put_shard(old))
    assert run(table.get_shard(batch.id, 0)) == old
    with pytest.raises(ConditionFailed):
        run(table.claim(batch.id, 0, owner="a", now=NOW, lease_seconds=LEASE_SECONDS))
    mine = run(table.claim(batch.id, 0, owner="a", now=LATER, lease_seconds=LEASE_SECONDS))
    expected = replace(old, owner="a", lease_until=LATER + LEASE_SECONDS, fence=4, attempts=3)
    assert mine == expected == run(table.get_shard(batch.id, 0))
    assert run(table.get_shard_progress(batch)).progress(NOW).num_rows == PROGRESS.num_rows
    run(table.release(mine, progress=PROGRESS, suspects=(), quarantined=(), attempts=0))
    free = run(table.get_shard(batch.id, 0))
    assert free == replace(old, owner=None, lease_until=0.0, fence=4, attempts=0, suspects=())


def test_a_rate_counts_while_the_shard_has_an_owner(run: Run, deployment: Deployment) -> None:
    """Rows stay rows; a worker that is gone produces none."""
    table, rate = deployment.table, replace(PROGRESS, rows_per_second=3.0, tokens_per_second=50.0)
    batch = run(in_progress(deployment, 3))
    for number, seconds in ((0, 10), (1, 60)):
        shard = run(table.claim(batch.id, number, owner="a", now=NOW, lease_seconds=seconds))
        run(table.renew(shard, lease_until=NOW + seconds, progress=rate, attempts=1))
    both, one, none = (
        run(table.get_shard_progress(batch)).progress(NOW + ago) for ago in (5, 11, 61)
    )
    assert (both.rows_per_second, both.tokens_per_second) == (6.0, 100.0)
    assert (one.rows_per_second, one.tokens_per_second) == (3.0, 50.0)
    assert none == (PROGRESS.without_rates + PROGRESS.without_rates)


def test_a_field_is_set_once(run: Run, deployment: Deployment) -> None:
    """The second gets what the first has chosen, and so does a first whose answer was lost."""
    batch = run(deployment.table.create_batch(make_batch(deployment)))
    numbers = count(1)
    set_once = deployment.table.set_once
    assert run(sent_twice(set_once(batch.id, "ended_at", next(numbers)))) == 1
    assert run(set_once(batch.id, "ended_at", next(numbers))) == 1


def test_fields_change_only_under_the_expected_status(run: Run, deployment: Deployment) -> None:
    """A batch with another status is unchanged; None removes a field."""
    batch = run(deployment.table.create_batch(make_batch(deployment)))
    change = deployment.table.change_batch
    changed = run(change(batch.id, Status.VALIDATING, output_joining="here", num_rows=3))
    assert changed == replace(batch, output_joining="here", num_rows=3)
    assert run(change(batch.id, Status.FINALIZING, output_joining="there")) is None
    changed = run(change(batch.id, Status.VALIDATING, output_joining=None))
    assert changed == run(deployment.table.get_batch(batch.id)) == replace(batch, num_rows=3)


def test_a_status_is_marked_as_announced_once(run: Run, deployment: Deployment) -> None:
    """The second caller learns that it was not the first; so does one whose batch has moved on."""
    table = deployment.table
    batch = run(table.create_batch(make_batch(deployment)))
    assert [run(table.note_announced(batch)) for _ in range(2)] == [True, False]
    moved = run(table.move_batch(batch.id, Status.IN_PROGRESS, NOW)).batch
    assert run(table.note_announced(batch)) is False
    assert moved is not None
    assert run(table.note_announced(moved)) is True
    assert run(table.get_batch(batch.id)) == replace(moved, announced=Status.IN_PROGRESS)
    assert run(table.note_announced(make_batch(deployment))) is False


def test_one_has_the_turn(run: Run, deployment: Deployment) -> None:
    """It holds the lock until it expires or is released; only the owner can release it."""
    batch = run(deployment.table.create_batch(make_batch(deployment)))

    def take(owner: str, now: float) -> bool:
        return run(
            deployment.table.acquire_lock(batch.id, owner, now=now, until=now + 10)
        ).is_acquired

    assert take("a", NOW)
    assert take("a", NOW + 1)
    assert not take("b", NOW + 2)
    run(deployment.table.release_lock(batch.id, "b"))
    assert not take("b", NOW + 3)
    run(deployment.table.release_lock(batch.id, "a"))
    assert take("b", NOW + 4)
    assert take("c", NOW + 20)
    assert not run(
        deployment.table.acquire_lock("batch_none", "a", now=NOW, until=NOW + 1)
    ).is_acquired


def test_a_turn_that_another_has_had_since_is_not_kept(run: Run, deployment: Deployment) -> None:
    """It is lost even if it is free again, because another run has used it."""
    table = deployment.table
    batch = run(table.create_batch(make_batch(deployment)))
    assert run(table.acquire_lock(batch.id, "held up", now=NOW, until=NOW + 10)).is_acquired
    assert run(table.renew_lock(batch.id, "held up", until=NOW + 20))
    assert run(table.acquire_lock(batch.id, "other", now=NOW + 30, until=NOW + 40)).is_acquired
    assert run(table.renew_lock(batch.id, "held up", until=NOW + 50)) is None
    run(table.release_lock(batch.id, "other"))
    assert run(table.renew_lock(batch.id, "held up", until=NOW + 50)) is None
    assert run(table.acquire_lock(batch.id, "next", now=NOW + 31, until=NOW + 41)).is_acquired


def test_a_move_releases_the_lock_of_its_run(run: Run, deployment: Deployment) -> None:
    """Another run's lock is not released; a repeated call changes nothing."""
    table = deployment.table
    batch = run(table.create_batch(make_batch(deployment, turn="a", turn_until=float(NOW))))

    def move(owner: str) -> Operation[MoveResult]:
        return table.move_batch(batch.id, Status.IN_PROGRESS, NOW, lock_owner=owner)

    assert run(move("b")) == (batch, False)
    moved = run(sent_twice(move("a")))
    expected = replace(batch.moved(Status.IN_PROGRESS, NOW), turn=None)
    assert moved == (expected, True) == (run(table.get_batch(batch.id)), True)
    assert run(table.acquire_lock(batch.id, "b", now=NOW - 9, until=NOW)).is_acquired
    assert run(move("a")).is_there
    assert not run(table.acquire_lock(batch.id, "a", now=NOW - 9, until=NOW)).is_acquired


def test_the_turn_says_how_the_batch_is(run: Run, deployment: Deployment) -> None:
    """The run that takes, renews or releases the lock sees concurrent changes, such as a cancel."""
    table = deployment.table
    batch = run(table.create_batch(make_batch(deployment)))
    taken = run(table.acquire_lock(batch.id, "a", now=NOW, until=NOW + 10))
    assert taken.batch == run(table.get_batch(batch.id))
    cancelled = run(table.move_batch(batch.id, Status.CANCELLING, NOW)).batch
    assert cancelled is not None
    kept = run(table.renew_lock(batch.id, "a", until=NOW + 20))
    assert kept == replace(cancelled, turn_until=NOW + 20)
    refused = run(table.acquire_lock(batch.id, "b", now=NOW, until=NOW + 30))
    assert refused == (kept, False)
    assert run(table.release_lock(batch.id, "b")) == kept
    given = run(table.release_lock(batch.id, "a"))
    assert given == replace(kept, turn=None) == run(table.get_batch(batch.id))


def test_an_end_is_chosen_once(run: Run, deployment: Deployment) -> None:
    """The status must allow it; a second call, or a retry after a lost reply, gets the first."""
    table = deployment.table
    batch = run(table.create_batch(make_batch(deployment)))
    assert run(table.choose_end(batch.id, Status.COMPLETED, NOW)) == batch
    chosen = run(sent_twice(table.choose_end(batch.id, Status.FAILED, NOW + 1)))
    assert chosen == replace(batch, ended_at=NOW + 1)
    assert run(table.choose_end(batch.id, Status.EXPIRED, NOW + 2)) == chosen
    assert run(table.choose_end("batch_none", Status.FAILED, NOW)) is None


def test_a_batch_is_taken_off_the_list(run: Run, deployment: Deployment) -> None:
    """A repeated call changes nothing, and others stay on the list."""
    gone, stays = (run(deployment.table.create_batch(make_batch(deployment))) for _ in range(2))
    run(deployment.table.forget_active(active_name(gone)))
    run(deployment.table.forget_active(active_name(gone)))
    active = run(active_ids(deployment.table))
    assert gone.id not in active
    assert stays.id in active


def test_a_file_comes_back_as_it_was(run: Run, deployment: Deployment) -> None:
    """Recorded twice it is one file; an unknown id is None."""
    file = File("file-1", "default", "output/x.jsonl", 5, NOW, "x.jsonl", "batch_output")
    run(deployment.files.put_file(file))
    run(deployment.files.put_file(file))
    assert run(deployment.files.get_file("file-1")) == file
    assert run(deployment.files.get_file("file-2")) is None


def test_an_aws_error_keeps_its_code(run: Run) -> None:
    """An error that no operation handles becomes an AwsError with AWS's code."""

    def bad_call() -> Operation[None]:
        yield Call("dynamodb", "get_item", {"TableName": "no-such-table", "Key": {}})

    with pytest.raises(AwsError) as caught:
        run(bad_call())
    assert caught.value.aws_code
