"""From an object to shards that can be run: one path for files of all sizes.

The whole file is looked at before anything of it runs. It is divided into ranges of bytes, which
are scanned by as many runs as there are; a file of one range is brought through by a single one,
which keeps all in memory. What several runs have to know of each other stands in the table
(`handler.batch.intake`), what they have found in the bucket.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from engine.batchfile.duplicates import DuplicateFinder
from engine.batchfile.forms import HEAD_BYTES, Form, form_of
from handler.aws.bucket import read_range
from handler.aws.items import dump, load
from handler.aws.queues import intake_message
from handler.aws.sync import Aws
from handler.batch.check import Verdict
from handler.batch.intake import Phase, Reading, Unit, begin_reading
from handler.batch.keys import plain_key
from handler.batch.model import Batch, Conversion
from handler.batch.states import Status
from handler.batch.wire import MAX_LISTED_ERRORS
from handler.deployment import Deployment
from handler.intake.convert import give_up, make_plain
from handler.intake.file import (
    FileRefused,
    admit,
    fail,
    let_run,
    reading_input,
    scanner_of,
    verdict_of,
)
from handler.intake.phases import go_on
from handler.intake.shards import record
from handler.intake.survey import Survey, shards_of
from handler.log import logger
from handler.moves.turn import TURN_SECONDS, ComeBack, Run, TurnLost
from handler.objects.stream import CHUNK_BYTES

# What is no longer is taken in where it is heard of: to ring for another run would take longer.
SHORT_BYTES = CHUNK_BYTES
_AFTER_SECONDS = TURN_SECONDS + 5
_FIRST = str(Unit(Phase.SCAN, 0))


def take_in(
    aws: Aws,
    deployment: Deployment,
    batch: Batch,
    time_left: Callable[[], float],
    *,
    now: Callable[[], float] = time.time,
    chunk_bytes: int = CHUNK_BYTES,
    is_patient: bool = True,
) -> Batch:
    """Bring a batch that is validating to `in_progress` or `failed`, or as far as one run can.

    `time_left` gives the seconds until the run must have ended. Returns the batch as it is then,
    when that is done or messages are on their way that go on with it. A run that is not patient
    leaves to others what is no short JSONL.
    """
    again = intake_message(batch.id)
    if not is_patient and batch.source.num_bytes > SHORT_BYTES:
        aws.run(deployment.intake.send(again, group=batch.tenant))
        return batch
    run = Run(aws, deployment, batch, time_left, now)
    if not run.take_turn():
        logger.info("another run has the batch", batch_id=batch.id)
        # It may have died: somebody must come when its turn has ended.
        delayed = deployment.intake.send(again, group=batch.tenant, delay_seconds=_AFTER_SECONDS)
        aws.run(delayed)
        return run.batch
    is_unfinished = False
    try:
        _go_on(run, chunk_bytes, is_patient=is_patient)
    except ComeBack:
        is_unfinished = True
    except TurnLost as exc:
        logger.info("intake stops", batch_id=batch.id, reason=str(exc))
        is_unfinished = True
    finally:
        begun = run.batch
        run.give_turn()
    if run.batch.status is not Status.VALIDATING:
        give_up(aws, deployment, begun)
    # Only now: whoever hears it must find the turn free.
    if is_unfinished:
        aws.run(deployment.intake.send(again, group=batch.tenant))
    return run.batch


def _go_on(run: Run, chunk_bytes: int, *, is_patient: bool) -> None:
    batch = run.batch
    if batch.status is not Status.VALIDATING:
        return
    if batch.errors:
        verdict = Verdict(batch.num_errors, batch.errors)
        fail(run.aws, run.deployment, batch, verdict, run.now())
        return
    try:
        with reading_input():
            form = _plain(run, is_patient=is_patient)
        reading = _begin(run, form)
        # Of no file whose units somebody has rung for, or that has come further.
        is_short = reading.num_ranges == 1 and not reading.is_rung and _FIRST in reading.left
        if not (is_short and _take_in_at_once(run, reading, chunk_bytes)):
            go_on(run, reading)
    except FileRefused as exc:
        fail(run.aws, run.deployment, batch, exc.verdict, run.now())


def _plain(run: Run, *, is_patient: bool) -> Form:
    """Return the form of the input, when the source is plain JSONL; raises FormError, ComeBack."""
    batch = run.batch
    if batch.conversion is None:
        head = read_range(batch.source, 0, min(HEAD_BYTES, batch.source.num_bytes))
        form = form_of(run.aws.run(head))
        if form.is_plain:
            return form
        batch = _begin_conversion(run, form)
    assert batch.conversion is not None
    if batch.original is None:
        if not is_patient:
            raise ComeBack
        make_plain(run, batch.conversion)
    return batch.conversion.form


def _begin_conversion(run: Run, form: Form) -> Batch:
    batch, bucket = run.batch, run.deployment.bucket
    key = plain_key(batch.id)
    begun = dump(Conversion(form, run.aws.run(bucket.create_work_upload(key))))
    chosen = run.aws.run(run.deployment.table.set_once(batch.id, "conversion", begun))
    if chosen != begun:
        run.aws.run(bucket.abort_upload(key, begun["upload"]))
    run.batch = replace(batch, conversion=load(Conversion, chosen))
    return run.batch


def _begin(run: Run, form: Form) -> Reading:
    """Return how far intake has come, or the beginning."""
    batch, settings = run.batch, run.deployment.settings
    reading = begin_reading(
        form,
        settings.shard_limits,
        batch.source.num_bytes,
        settings.range_bytes,
        batch.expires,
    )
    return run.aws.run(run.deployment.readings.begin_reading(batch.id, reading))


def _take_in_at_once(run: Run, reading: Reading, chunk_bytes: int) -> bool:
    """Bring a file of one range through; a run that dies has left nothing that counts.

    False for one that has too many lines for a run: then nothing is done.
    """
    aws, deployment, batch = run.aws, run.deployment, run.batch
    scanner = scanner_of(aws, deployment, batch, reading, look=run.stay, chunk_bytes=chunk_bytes)
    survey = Survey()
    with DuplicateFinder() as finder:
        with reading_input():
            scanned = scanner.scan(reading.range_of(0), finder)
            if scanned.end is not None:
                return False
            survey.add(Unit(Phase.SCAN, 0), scanned)
        duplicates = finder.find(MAX_LISTED_ERRORS, run.stay)
    verdict = verdict_of(batch, reading, survey.findings, duplicates)
    if verdict.num_errors:
        raise FileRefused(verdict)
    admit(aws, deployment, batch, survey.findings)
    record(
        aws,
        deployment,
        shards_of(batch.id, scanned.cuts, first=0, shift=0, expires=batch.expires),
    )
    let_run(aws, deployment, batch, survey, run.now())
    return True
