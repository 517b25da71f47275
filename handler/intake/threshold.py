"""Threshold of a cascade: learnt once its first model has decided all rows of a table.

The answers to gold rows are in drafts, and the gold answers in a column of the table, which the
models never see. The libraries that read tables are in the intake Lambda only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from operator import itemgetter

from tidemill.batch.calibration.threshold import GoldRow, find_threshold
from tidemill.batch.file.decided_row import DecidedRow
from tidemill.batch.model import Batch, BatchError, Shard
from tidemill.batch.states import Status
from tidemill.batch.table.gold_rows import Gold, gold_answers_of, gold_row_of
from tidemill.batch.table.reader import open_table
from tidemill.batch.table.recipe import parse_recipe

from ..aws.items import dump
from ..aws.objects.object_file import open_object
from ..aws.queues import advance_message
from ..aws.sync import Aws
from ..deployment import Deployment
from ..errors import NotThere, ObjectChanged
from ..observability import logger

_NUM_THREADS = 8
MAX_GOLD_ROWS = 100_000
"""Gold rows that are read; of more, evenly spaced ones are."""


def learn_threshold(aws: Aws, deployment: Deployment, batch_id: str) -> None:
    """Learn the threshold of a batch if that is due, and send its shards to the second model.

    Idempotent: the answers are final, so that every run learns the same. The reaper resends the
    messages of a run that died after the threshold was recorded. A batch whose table was replaced
    since fails.
    """
    table = deployment.table
    batch = aws.run(table.get_batch(batch_id))
    if batch is None or batch.status is not Status.IN_PROGRESS or not batch.awaits_threshold:
        return
    progress = aws.run(table.get_shard_progress(batch))
    if not progress.are_decided(batch.shards_left):
        return
    found = batch.escalation
    assert found is not None
    assert found.target is not None
    try:
        learnt = find_threshold([*_gold_rows(aws, deployment, batch)], found.target)
    except (NotThere, ObjectChanged) as exc:
        _fail(aws, deployment, batch, str(exc))
        return
    escalation = dump(replace(found, learnt=learnt))
    changed = aws.run(table.change_batch(batch_id, Status.IN_PROGRESS, escalation=escalation))
    if changed is None:
        logger.info("threshold not recorded", batch_id=batch_id, reason="the batch is ending")
        return
    logger.info("threshold learnt", batch_id=batch_id, **dump(learnt))
    numbers = [shard.number for shard in progress.live if shard.is_escalated]
    if (queue := deployment.work.get(found.model)) is not None:
        sending = queue.send_shards(batch_id, numbers, group=batch.tenant, is_escalated=True)
        aws.run(sending)


def _fail(aws: Aws, deployment: Deployment, batch: Batch, reason: str) -> None:
    """Fail a batch whose table no longer exists; it keeps the first model's answers."""
    logger.error("input changed", batch_id=batch.id, reason=reason)
    error = BatchError(ObjectChanged.code, "The input was deleted or changed during the run.")
    aws.run(
        deployment.table.move_batch(
            batch.id,
            Status.FINALIZING,
            int(time.time()),
            outcome=str(Status.FAILED),
            errors=[dump(one) for one in (*batch.errors, error)],
            num_errors=batch.num_errors + 1,
        )
    )
    aws.run(deployment.control.send(advance_message(batch.id), group=batch.tenant))


def _gold_rows(aws: Aws, deployment: Deployment, batch: Batch) -> Iterator[GoldRow]:
    """Yield the rows that the first model answered and whose answers are known, in order."""
    assert batch.conversion is not None
    assert batch.conversion.recipe is not None
    recipe = parse_recipe(json.loads(batch.conversion.recipe), may_escalate=True)
    assert recipe.calibration is not None
    with open_object(aws, batch.input) as file:
        gold = _some(gold_answers_of(open_table(file), recipe.calibration, recipe.questions))
    first: int | None = 0
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        while first is not None:
            shards, first = aws.run(deployment.table.list_shards_page(batch.id, first))
            for drafts in pool.map(partial(_drafts, aws, deployment, gold.keys()), shards):
                for line, row in drafts:
                    if row.body is not None:
                        yield gold_row_of(row, gold[line], recipe.questions)


def _some(answers: Iterable[Gold]) -> dict[int, Gold]:
    """Return the gold answers by line, of evenly spaced rows if there are many."""
    found: dict[int, Gold] = {}
    num_seen, step = 0, 1
    for line, gold in enumerate(answers, 1):
        if not gold:
            continue
        if num_seen % step == 0:
            found[line] = gold
        num_seen += 1
        if len(found) == 2 * MAX_GOLD_ROWS:
            found, step = dict(islice(found.items(), 0, None, 2)), 2 * step
    return found


def _drafts(
    aws: Aws, deployment: Deployment, lines: AbstractSet[int], shard: Shard
) -> list[tuple[int, DecidedRow]]:
    """Return the drafts of those lines in a shard, in order."""
    wanted = [
        line for line in range(shard.first_line, shard.first_line + shard.num_rows) if line in lines
    ]
    if not wanted:
        return []
    bucket, found = deployment.bucket, []

    def left_out(key: str, reason: str) -> None:
        logger.error("part unreadable", batch_id=shard.batch_id, key=key, reason=reason)

    index = aws.run(
        bucket.index_parts(shard.batch_id, shard.number, left_out=left_out, are_drafts=True)
    )
    for key, places in index.places(set(wanted)).items():
        part = aws.run(bucket.get(key))
        found += [(each.line, DecidedRow.parse(part[each.start : each.end])) for each in places]
    return sorted(found, key=itemgetter(0))
