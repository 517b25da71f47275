"""Threshold of a cascade: learnt once its first model has decided all rows of a table.

The answers to gold rows are in drafts, and the gold answers in a column of the table, which the
models never see. The libraries that read tables are in the intake Lambda only.

One run at a time does this, a few shards at once. A run that reaches its deadline stores its work,
which the next one continues.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import itemgetter
from typing import TypeVar

from pydantic import TypeAdapter

from tidemill.batch.calibration.threshold import GoldRow, find_threshold
from tidemill.batch.escalation import Threshold
from tidemill.batch.file.decided_row import DecidedRow
from tidemill.batch.model import Batch, BatchError, Shard
from tidemill.batch.object_keys import threshold_key
from tidemill.batch.progress import HistoryBucket, history_bucket
from tidemill.batch.shard_cascade import ShardCascade
from tidemill.batch.states import Status
from tidemill.batch.table.errors import TableError
from tidemill.batch.table.gold_rows import Gold, gold_answers_of, gold_row_of
from tidemill.batch.table.reader import open_table
from tidemill.batch.table.recipe import Recipe, parse_recipe
from tidemill.protocol.errors import ProtocolError

from ..aws.items import dump
from ..aws.objects.object_file import open_object
from ..aws.queues import advance_message, threshold_message
from ..aws.sync import Aws
from ..deployment import Deployment
from ..errors import NotThere, ObjectChanged
from ..lifecycle.batch_lock import RESERVE_SECONDS, BatchLock, LockLost, Requeue
from ..lifecycle.part_index import index_parts
from ..observability import emit, figures_of, logger

T = TypeVar("T")

_NUM_THREADS = 8
_NUM_AT_ONCE = 2 * _NUM_THREADS
_LOOK_EVERY_ROWS = 1000
# The first run may have begun shortly before its deadline.
_MAX_READS = 2
_INPUT_CHANGED = "The input was deleted or changed during the run."
_TOO_LONG = (
    "Reading the known answers of the table takes too long: "
    "use a smaller table, or pass `escalate_below` instead of `target_accuracy`."
)
MAX_GOLD_ROWS = 100_000
"""Number of gold rows that are enough: of twice as many, evenly spaced ones are retained."""


@dataclass(slots=True)
class _Work:
    """Work so far: gold rows of the shards before `first`; once `learnt`, those are counted.

    `answers` are the gold answers by line, None until one of `num_reads` has reached their end.
    """

    num_reads: int = 0
    answers: dict[int, Gold] | None = None
    first: int | None = 0
    gold: list[GoldRow] = field(default_factory=list)
    learnt: Threshold | None = None


_WORK = TypeAdapter(_Work)


def learn_threshold(
    aws: Aws,
    deployment: Deployment,
    batch_id: str,
    time_left: Callable[[], float],
    *,
    now: Callable[[], float] = time.time,
) -> None:
    """Learn the threshold of a batch if that is due, and send its shards to the second model.

    Idempotent: the answers are final, so that every run learns the same. The reaper resends the
    messages of a run that died. A batch whose gold answers cannot be read fails.
    """
    batch = aws.run(deployment.table.get_batch(batch_id))
    if batch is None:
        return
    is_left = False
    if _is_due(batch):
        lock = BatchLock(aws, deployment, batch, time_left, now)
        if not lock.acquire():
            logger.info("another run has the batch", batch_id=batch_id)
            return
        try:
            is_left = _learn_if_due(lock)
        finally:
            lock.release()
        batch = lock.batch
    # Released first: the receivers of the messages must find the lock free.
    if _must_end(batch, now()):
        # The messages that it got while a run had the lock are gone.
        _advance(aws, deployment, batch)
    elif is_left:
        aws.run(deployment.intake.send(threshold_message(batch_id), group=batch.tenant))


def _learn_if_due(lock: BatchLock) -> bool:
    """Learn the threshold if that is due; return whether another run has to continue."""
    try:
        if _is_due(lock.batch) and _are_decided(lock):
            _learn(lock)
    except Requeue:
        return True
    except LockLost as exc:
        logger.info("threshold not learnt", batch_id=lock.batch.id, reason=str(exc))
    except (NotThere, ObjectChanged) as exc:
        _fail(lock, ObjectChanged.code, _INPUT_CHANGED, reason=str(exc))
    except ProtocolError as exc:  # of an earlier version's recipe, or of the table
        _fail(lock, exc.code, str(exc), reason=str(exc))
    return False


def _must_end(batch: Batch, now: float) -> bool:
    """Return whether a batch is finishing, or its window has ended."""
    is_running = batch.status is Status.IN_PROGRESS and batch.expires_at > now
    return not (is_running or batch.is_terminal)


def _advance(aws: Aws, deployment: Deployment, batch: Batch) -> None:
    aws.run(deployment.control.send(advance_message(batch.id), group=batch.tenant))


def _is_due(batch: Batch) -> bool:
    return batch.status is Status.IN_PROGRESS and batch.awaits_threshold


def _are_decided(lock: BatchLock) -> bool:
    progress = lock.aws.run(lock.deployment.table.get_shard_progress(lock.batch))
    return progress.are_decided(lock.batch.shards_left)


def _learn(lock: BatchLock) -> None:
    """Record the threshold, and before that how many rows of each shard are below it."""
    aws, deployment, found = lock.aws, lock.deployment, lock.batch.escalation
    assert found is not None
    assert found.target is not None
    work = _load(lock)
    try:
        if work.learnt is None:
            _read_gold_rows(lock, work)
            work = _Work(learnt=find_threshold(work.gold, found.target))
        learnt = replace(lock.batch, escalation=replace(found, learnt=work.learnt))
        for shards in _shards(lock, work):
            _in_threads(lambda shard: _count(lock, learnt, shard), shards)
    except Requeue:
        aws.run(deployment.bucket.put(threshold_key(lock.batch.id), _WORK.dump_json(work)))
        raise
    lock.change(escalation=dump(learnt.escalation))
    logger.info("threshold learnt", batch_id=learnt.id, **dump(work.learnt))
    _send_shards(lock)


def _send_shards(lock: BatchLock) -> None:
    """Send the shards with rows for the second model to it, and have the others closed."""
    aws, deployment, batch = lock.aws, lock.deployment, lock.batch
    progress = aws.run(deployment.table.get_shard_progress(batch))
    queue = deployment.work.get(batch.model_of(is_escalated=True))
    if queue is not None:
        waiting = (shard for shard in progress.live if shard.has_escalated_rows)
        numbers = [shard.number for shard in waiting if not shard.is_given_up]
        sending = queue.send_shards(batch.id, numbers, group=batch.tenant, is_escalated=True)
        aws.run(sending)
    if progress.to_close(batch):
        _advance(aws, deployment, batch)


def _load(lock: BatchLock) -> _Work:
    """Return the work of the runs before."""
    try:
        return _WORK.validate_json(
            lock.aws.run(lock.deployment.bucket.get(threshold_key(lock.batch.id)))
        )
    except NotThere:
        return _Work()


def _look(lock: BatchLock) -> None:
    """Raise Requeue near the deadline, and LockLost for a batch that has to end."""
    if lock.time_left() < RESERVE_SECONDS:
        raise Requeue
    lock.check_active()


def _shards(lock: BatchLock, work: _Work) -> Iterator[list[Shard]]:
    """Yield the shards whose work is not done, a few at a time; they are done afterwards."""
    while work.first is not None:
        _look(lock)
        page = lock.deployment.table.list_shards_page(lock.batch.id, work.first, _NUM_AT_ONCE)
        shards, following = lock.aws.run(page)
        yield shards
        work.first = following


def _in_threads(do: Callable[[Shard], T], shards: Sequence[Shard]) -> list[T]:
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return list(pool.map(do, shards))


def _count(lock: BatchLock, batch: Batch, shard: Shard) -> None:
    """Record how many rows of a shard the second model decides; the others are final."""
    aws, deployment = lock.aws, lock.deployment
    if not shard.is_escalated:
        return
    index = index_parts(aws, deployment, shard)
    drafts = index_parts(aws, deployment, shard, are_drafts=True)
    cascade, sure = ShardCascade(batch, shard), set[int]()
    for key, places in drafts.places().items():
        sure.update(cascade.sure_lines(aws.run(deployment.bucket.get(key)), places))
    accepted, unsure = drafts.split(sure)
    index.merge(accepted)
    counts = index.progress(unsure)
    progress = replace(
        shard.progress,
        completed=counts.completed,
        reused=counts.reused,
        truncated=counts.truncated,
        # A line without a readable draft is run by the second model, too.
        escalated=shard.num_rows - len(index),
    )
    if aws.run(deployment.table.count_escalated(shard, progress)):
        gained = progress.since(shard.progress)
        emit(figures_of(gained), model=batch.model, batch_id=batch.id)
        bucket = HistoryBucket.of(*history_bucket(batch, lock.now()), gained)
        aws.run(deployment.ledger.add_history(batch, bucket))


def _fail(lock: BatchLock, code: str, message: str, *, reason: str) -> None:
    """Fail a batch whose threshold cannot be learnt; it keeps the first model's answers."""
    batch = lock.batch
    logger.error("threshold cannot be learnt", batch_id=batch.id, code=code, reason=reason)
    error = BatchError(code, message)
    lock.aws.run(
        lock.deployment.table.move_batch(
            batch.id,
            Status.FINALIZING,
            int(lock.now()),
            outcome=str(Status.FAILED),
            errors=[dump(one) for one in (*batch.errors, error)],
            num_errors=batch.num_errors + 1,
        )
    )


def _read_gold_rows(lock: BatchLock, work: _Work) -> None:
    """Add the rows that the first model answered and whose answers are known, in order."""
    aws, deployment, batch = lock.aws, lock.deployment, lock.batch
    assert batch.conversion is not None
    assert batch.conversion.recipe is not None
    recipe = parse_recipe(json.loads(batch.conversion.recipe), may_escalate=True)
    questions = recipe.questions
    if work.answers is None:
        work.answers = _read_answers(lock, work, recipe)
    gold = work.answers

    def rows_of(shard: Shard) -> list[GoldRow]:
        drafts = _drafts(aws, deployment, gold, shard)
        return [gold_row_of(row, gold[line], questions) for line, row in drafts if row.body]

    for shards in _shards(lock, work):
        for rows in _in_threads(rows_of, shards):
            work.gold += rows


def _read_answers(lock: BatchLock, work: _Work, recipe: Recipe) -> dict[int, Gold]:
    """Return the gold answers by line; raises TableError if runs before had no time for that."""
    assert recipe.calibration is not None
    if work.num_reads == _MAX_READS:
        raise TableError(_TOO_LONG)
    work.num_reads += 1
    with open_object(lock.aws, lock.batch.input, lock.check_active) as file:
        answers = gold_answers_of(open_table(file), recipe.calibration, recipe.questions)
        return _some(answers, lambda: _look(lock))


def _some(answers: Iterable[Gold], look: Callable[[], None]) -> dict[int, Gold]:
    """Return the gold answers by line, of evenly spaced rows if there are many."""
    found: dict[int, Gold] = {}
    num_seen, step = 0, 1
    for line, gold in enumerate(answers, 1):
        if line % _LOOK_EVERY_ROWS == 0:
            look()
        if not gold:
            continue
        if num_seen % step == 0:
            found[line] = gold
        num_seen += 1
        if len(found) == 2 * MAX_GOLD_ROWS:
            found, step = dict(islice(found.items(), 0, None, 2)), 2 * step
    return found


def _drafts(
    aws: Aws, deployment: Deployment, lines: Container[int], shard: Shard
) -> list[tuple[int, DecidedRow]]:
    """Return the drafts of those lines in a shard, in order."""
    numbers = range(shard.first_line, shard.first_line + shard.num_rows)
    wanted = {line for line in numbers if line in lines}
    if not wanted:
        return []
    found = []
    index = index_parts(aws, deployment, shard, are_drafts=True)
    for key, places in index.places(wanted).items():
        part = aws.run(deployment.bucket.get(key))
        found += [(each.line, DecidedRow.parse(part[each.start : each.end])) for each in places]
    return sorted(found, key=itemgetter(0))
