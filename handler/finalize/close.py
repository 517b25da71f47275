"""Seals the shards that no worker will finish, so that every line gets a row.

A shard is claimed as by a worker, so a worker that still runs it can no longer commit. Durable rows
are retained. The other lines' rows depend on the reason: `batch_expired` if the window has ended
or `max_cost` is reached, `shard_failed` if the shard was given up; none if the batch was
cancelled or has failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import islice
from threading import Lock
from uuid import uuid4

from tidemill.batch.file.lines import RawLine, read_lines
from tidemill.batch.model import Batch, Shard, ShardStatus
from tidemill.batch.object_keys import fill_key, kept_drafts_key
from tidemill.batch.parts import (
    EXPIRED,
    OVER_COST,
    FinishedRow,
    NotRun,
    PartIndex,
    decode_index,
    encode_part,
    row_not_run,
)
from tidemill.batch.progress_counts import Progress
from tidemill.batch.shard_cascade import ShardCascade
from tidemill.batch.states import Status

from ..aws.objects.stream import LineStream, ObjectStream
from ..aws.queues import advance_message, shard_message
from ..aws.sync import Aws
from ..deployment import Deployment
from ..errors import ConditionFailed, LeaseLost, NotThere, ObjectChanged
from ..lifecycle.batch_lock import RESERVE_SECONDS, BatchLock, Requeue
from ..lifecycle.finish import abandon
from ..lifecycle.part_index import index_parts
from ..observability import emit, figures_of, logger
from .sealed import each_shard

# Time for workers to notice that the batch is finishing; after that their leases are ignored.
PATIENCE_SECONDS = 8.0
_WAIT_SECONDS = 1.0
_LEASE_SECONDS = 60.0
# Each thread holds the parts of one shard.
_NUM_THREADS = 4
_NUM_AT_ONCE = 4 * _NUM_THREADS
# A line of 36 MiB takes a gigabyte while it is parsed, so only one is parsed at a time.
_parsing = Lock()

_UNREADABLE = "The input can no longer be read, so lines that were not run have no row"


def skip_reason(batch: Batch, shard: Shard) -> NotRun | None:
    """Return the error for lines of a shard without a row; None if they get no row."""
    if batch.status is Status.CANCELLING or batch.outcome is Status.FAILED:
        return None
    if batch.outcome is Status.EXPIRED and shard.abandoned is None:
        return OVER_COST if batch.has_cost_all else EXPIRED
    return NotRun("shard_failed", shard.abandoned or "The shard was given up.", is_failure=True)


def close_shards(lock: BatchLock) -> None:
    """Seal the shards of a batch that is finishing: afterwards each is sealed or has no row.

    Raises Requeue while workers may still commit rows, and at the deadline.
    """
    if lock.aws.run(lock.deployment.table.count_left(lock.batch)) == 0:
        return
    shards = each_shard(lock.aws, lock.deployment, lock.batch.id, lock.check_deadline)
    closing = (shard for shard in shards if _is_to_close(lock.batch, shard))
    steal = lock.now() - (lock.batch.winds_up_since or 0) > PATIENCE_SECONDS
    if not _close_all(
        lock.aws,
        lock.deployment,
        lock.batch,
        closing,
        now=lock.now,
        steal=steal,
        check=lock.check_deadline,
    ):
        raise Requeue(_WAIT_SECONDS)


def close_settled(
    aws: Aws,
    deployment: Deployment,
    batch: Batch,
    time_left: Callable[[], float],
    now: Callable[[], float] = time.time,
) -> None:
    """Seal the shards of a running batch that no worker will run, and notify it if there were any.

    A shard that a worker still holds is checked again when its lease has ended.
    """
    table = deployment.table
    over = aws.run(table.get_shard_progress(batch)).to_close(batch)
    found = aws.run_all(table.get_shard(batch.id, shard.number) for shard in over)
    closing = [shard for shard in found if shard and shard.status is ShardStatus.PENDING]
    if not closing:
        return

    def check() -> None:
        if time_left() < RESERVE_SECONDS:
            raise Requeue

    delay_seconds = 0.0
    try:
        if not _close_all(aws, deployment, batch, closing, now=now, steal=False, check=check):
            leased = [shard.lease_until for shard in closing if shard.is_leased(now())]
            delay_seconds = max(_WAIT_SECONDS, min(leased, default=0.0) + 1 - now())
    except Requeue:
        logger.info("another run continues closing", batch_id=batch.id)
    message, tenant = advance_message(batch.id), batch.tenant
    aws.run(deployment.control.send(message, group=tenant, delay_seconds=delay_seconds))


def _is_to_close(batch: Batch, shard: Shard) -> bool:
    """Return whether a pending shard must be closed: it was ever claimed, or needs error rows."""
    is_pending = shard.status is ShardStatus.PENDING
    return is_pending and (shard.fence > 0 or skip_reason(batch, shard) is not None)


def _close_all(
    aws: Aws,
    deployment: Deployment,
    batch: Batch,
    shards: Iterable[Shard],
    *,
    now: Callable[[], float],
    steal: bool,
    check: Callable[[], None],
) -> bool:
    """Close shards a few at a time, with a check before each few; False if one is still held."""
    rest = iter(shards)
    are_closed = True
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        while some := list(islice(rest, _NUM_AT_ONCE)):
            check()
            closed = pool.map(
                lambda shard: _close(aws, deployment, batch, shard, now=now(), steal=steal), some
            )
            are_closed = all(list(closed)) and are_closed
    return are_closed


def _close(
    aws: Aws, deployment: Deployment, batch: Batch, shard: Shard, *, now: float, steal: bool
) -> bool:
    """Claim, fill, seal and commit one shard; False if another process has it."""
    table = deployment.table
    try:
        mine = aws.run(
            table.claim(
                batch.id,
                shard.number,
                owner=f"finalize-{uuid4().hex}",
                now=now,
                lease_seconds=_LEASE_SECONDS,
                steal=steal,
            )
        )
    except ConditionFailed as exc:
        return exc.item is not None and exc.item["status"] == ShardStatus.DONE
    index = index_parts(aws, deployment, mine)
    drafts, kept = _read_drafts(aws, deployment, batch, mine, index)
    try:
        if _may_still_run(batch, mine) and len(index) < mine.num_rows:
            _give_back(aws, deployment, batch, mine, num_left=mine.num_rows - len(index))
        else:
            _add(aws, deployment, kept_drafts_key(batch.id, mine.number, mine.fence), kept, index)
            _seal(aws, deployment, batch, mine, index, durable=index.progress(drafts))
    except LeaseLost:
        return False
    return True


def _may_still_run(batch: Batch, shard: Shard) -> bool:
    """Return whether the second model may answer the lines of a shard that have no row."""
    is_running = batch.status is Status.IN_PROGRESS
    return is_running and shard.is_escalated and shard.abandoned is None


def _give_back(
    aws: Aws, deployment: Deployment, batch: Batch, shard: Shard, *, num_left: int
) -> None:
    """Leave the rows that are missing after all to the second model; raises LeaseLost."""
    logger.error("rows missing", batch_id=batch.id, shard=shard.number, num_rows=num_left)
    aws.run(
        deployment.table.release(
            shard,
            progress=replace(shard.progress, escalated=num_left),
            suspects=shard.suspects,
            quarantined=shard.quarantined,
            attempts=shard.attempts - 1,
        )
    )
    queue = deployment.work.get(batch.model_of(is_escalated=True))
    if queue is not None:
        message = shard_message(batch.id, shard.number, is_escalated=True)
        aws.run(queue.send(message, group=batch.tenant))


def _seal(
    aws: Aws,
    deployment: Deployment,
    batch: Batch,
    mine: Shard,
    index: PartIndex,
    *,
    durable: Progress,
) -> None:
    """Fill, seal and commit a claimed shard; raises LeaseLost."""
    mine, num_failures = _fill(aws, deployment, batch, mine, index)
    seal = index.seal()
    aws.run(deployment.bucket.put_segments(mine, seal))
    is_whole = durable.num_rows + num_failures == mine.num_rows
    expected = mine.expected if is_whole else mine.progress.expected
    final = replace(
        durable,
        failed=durable.failed + num_failures,
        gpu_seconds=mine.progress.gpu_seconds,
        escalated_gpu_seconds=mine.progress.escalated_gpu_seconds,
        expected_input_tokens=expected.input,
        expected_output_tokens=expected.output,
        first_row_at=mine.progress.first_row_at,
        last_row_at=mine.progress.last_row_at,
    )
    aws.run(
        deployment.table.commit(
            mine,
            progress=final,
            output_sizes=[segment.num_bytes for segment in seal.output],
            error_sizes=[segment.num_bytes for segment in seal.errors],
        )
    )
    emit(figures_of(final.since(mine.progress)), model=batch.model, batch_id=batch.id)
    logger.info(
        "shard closed",
        batch_id=batch.id,
        shard=mine.number,
        fence=mine.fence,
        kept_lines=durable.num_rows,
        filled_lines=len(index) - durable.num_rows,
    )


def _read_drafts(
    aws: Aws, deployment: Deployment, batch: Batch, shard: Shard, index: PartIndex
) -> tuple[PartIndex, list[FinishedRow]]:
    """Add the drafts of which the first model is sure; return the index of the others.

    The second item has the rows of those whose line has no row, with the reason why they were not
    escalated.
    """
    if batch.escalation is None:
        return PartIndex(), []
    drafts = index_parts(aws, deployment, shard, are_drafts=True)
    cascade, reason = ShardCascade(batch, shard), _reason_of_draft(batch, shard)
    sure: set[int] = set()
    kept: list[FinishedRow] = []
    for key, places in drafts.places(drafts.lines - index.lines).items():
        part = aws.run(deployment.bucket.get(key))
        sure.update(cascade.sure_lines(part, places))
        kept += [
            cascade.row_of_draft(place, part[place.start : place.end], reason)
            for place in places
            if place.line not in sure
        ]
    accepted, unsure = drafts.split(sure)
    index.merge(accepted)
    return unsure, kept


def _add(
    aws: Aws, deployment: Deployment, key: str, rows: Sequence[FinishedRow], index: PartIndex
) -> None:
    """Write rows, if there are any, as an object that is not listed as a part."""
    if rows:
        part = encode_part(rows)
        aws.run(deployment.bucket.put(key, part))
        index.add(key, decode_index(part))


def _reason_of_draft(batch: Batch, shard: Shard) -> dict[str, str]:
    """Return the error of a second model that will not run the lines of a shard."""
    if (reason := skip_reason(batch, shard)) is not None:
        return {"code": reason.code, "message": reason.message}
    if batch.status is Status.CANCELLING:
        return {
            "code": "batch_cancelled",
            "message": "The batch was cancelled before the second model ran this line.",
        }
    message = "The batch failed before the second model ran this line."
    return {"code": "batch_failed", "message": message}


def _fill(
    aws: Aws, deployment: Deployment, batch: Batch, shard: Shard, index: PartIndex
) -> tuple[Shard, int]:
    """Write the missing row of every line without one; return how many of them are failures.

    The returned shard is given up if its lines cannot be read. The rows go to a separate object:
    if this run dies, the next one must be able to tell them from real failures.
    """
    reason = skip_reason(batch, shard)
    if reason is None or len(index) == shard.num_rows:
        return shard, 0
    # As a stream: the only line of a shard may be a gigabyte that is to be skipped.
    source = replace(batch.source, num_bytes=shard.end)
    with closing(ObjectStream(aws, source, shard.start)) as stream:
        lines = read_lines(LineStream(stream), first_number=shard.first_line)
        try:
            filled = [_row_of(line, reason, batch) for line in lines if line.number not in index]
        except (NotThere, ObjectChanged):
            if shard.abandoned is not None:
                return shard, 0
            aws.run(abandon(deployment, batch.id, shard.number, _UNREADABLE, model=batch.model))
            return replace(shard, abandoned=_UNREADABLE), 0
    key = fill_key(batch.id, shard.number, shard.fence)
    _add(aws, deployment, key, [row for row, _ in filled], index)
    return shard, sum(is_failure for _, is_failure in filled)


def _row_of(raw: RawLine, reason: NotRun, batch: Batch) -> tuple[FinishedRow, bool]:
    with _parsing:
        row, is_failure = row_not_run(raw, reason)
        if batch.options.echo_fields:
            from tidemill.batch.file.echoed_fields import EchoedFields  # late: few batches echo

            echo = EchoedFields(batch.options.echo_fields, batch.vendor)
            row = row._replace(row=echo.add_to(row.row, raw))
        return row, is_failure
