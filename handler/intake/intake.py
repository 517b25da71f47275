"""Intake: from an object to shards that can run; one path for files of all sizes.

The whole file is checked before any of it runs. It is divided into ranges of bytes, which
concurrent runs scan; a file of one range is handled by a single run, which keeps everything in
memory. Runs share their progress in the table (`batch.intake_progress`), and their findings in the
bucket.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, NamedTuple
from uuid import uuid4

from tidemill.batch.batch_object import MAX_LISTED_ERRORS
from tidemill.batch.batch_request import ECHO_OF_TABLE
from tidemill.batch.errors import HandlerError, InvalidOption
from tidemill.batch.escalation import Escalation
from tidemill.batch.file.duplicate_ids import DuplicateFinder
from tidemill.batch.file.formats import (
    HEAD_BYTES,
    FileFormat,
    begins_with_request,
    detect_format,
)
from tidemill.batch.intake_progress import IntakeProgress, Phase, WorkUnit, new_progress
from tidemill.batch.model import Batch, Conversion
from tidemill.batch.object_keys import INPUT_PREFIX, converted_key, recipe_key, table_key
from tidemill.batch.states import Status
from tidemill.batch.table.detection import detect_table
from tidemill.batch.table.errors import RecipeError
from tidemill.batch.validation import Verdict

from ..aws.bucket import read_range
from ..aws.calls import Operation
from ..aws.items import dump, load
from ..aws.objects.stream import CHUNK_BYTES
from ..aws.queues import intake_message
from ..aws.sync import Aws
from ..deployment import Deployment
from ..lifecycle.announce import announce
from ..lifecycle.batch_lock import LOCK_SECONDS, BatchLock, LockLost, Requeue
from ..observability import logger
from .convert import abort_conversion, convert_to_jsonl
from .escalation import escalation_of
from .failures import is_ended_by_failure
from .new_batch import SHORT_BYTES
from .phases import advance_phase
from .scan_summary import ScanSummary, shards_of
from .shards import record_shards
from .verdict import (
    FileRefused,
    fail_batch,
    make_scanner,
    refusing_bad_input,
    reserve_lines,
    start_batch,
    verdict_of,
)

# A folder may be uploaded file by file, so the recipe may come a moment after the table.
_PATIENCE_SECONDS: Final = 20
_WAIT_SECONDS: Final = 2.0
_BINARY: Final = ("parquet", "arrow")


class TableRecipe(NamedTuple):
    """The keys of a recipe as JSON, the format of its output, its second model and its priority."""

    keys: str
    output: str
    escalation: Escalation | None
    priority: int | None = None


def find_recipe(
    deployment: Deployment, batch: Batch, head: bytes, now: float
) -> Operation[TableRecipe | None]:
    """Return the recipe of a table; None for a file of requests, or without a recipe.

    Raises RecipeError, and Requeue if the recipe may still arrive.
    """
    form, requested = detect_table(head), batch.options.table_recipe
    if requested is not None and form is None:
        raise RecipeError("the file is not a table, or contains requests: remove `recipe`")
    if form is None or not (requested or batch.source.key.startswith(INPUT_PREFIX)):
        return None
    # Imported late: most files are not tables.
    from tidemill.batch.table.drop_recipe import MAX_BYTES, recipe_of_file, recipe_of_metadata
    from tidemill.batch.table.recipe import parse_recipe

    key = recipe_key(batch.source.key)
    if requested is not None:
        keys = json.loads(requested)
    elif batch.options.recipe:
        keys = recipe_of_metadata(batch.options.recipe)
    elif (data := (yield from _read_start(deployment, key, MAX_BYTES + 1))) is not None:
        keys = recipe_of_file(data)
    elif form in _BINARY and now < batch.created_at + _PATIENCE_SECONDS:
        raise Requeue(_WAIT_SECONDS)
    else:
        return None
    keys = yield from _with_calibration(deployment, batch, keys, now)
    recipe = parse_recipe(keys, may_escalate=True)
    escalation = batch.escalation
    if recipe.escalate is not None:
        escalation = escalation_of(deployment, recipe.escalate, recipe)
    if escalation is not None:
        from tidemill.batch.table.cascade_keys import check_cascade

        check_cascade(recipe.questions, keys, escalation.target)
    keys_as_json = json.dumps(keys, ensure_ascii=False)
    return TableRecipe(keys_as_json, recipe.output or form, escalation, recipe.priority)


def _with_calibration(
    deployment: Deployment, batch: Batch, keys: dict[str, Any], now: float
) -> Operation[dict[str, Any]]:
    """Return the keys of a recipe with the content of the calibration that it names.

    Raises RecipeError for another file, and Requeue if it may still arrive.
    """
    from tidemill.batch.table.drop_recipe import (  # late: most files are not tables
        MAX_CALIBRATION_BYTES,
        calibration_name,
        calibration_of_file,
    )

    if (name := calibration_name(keys)) is None:
        return keys
    folder, slash, _ = batch.source.key.rpartition("/")
    key = f"{folder}{slash}{name}"
    data = yield from _read_start(deployment, key, MAX_CALIBRATION_BYTES + 1)
    if data is None:
        if now < batch.created_at + _PATIENCE_SECONDS:
            raise Requeue(_WAIT_SECONDS)
        raise RecipeError(f"`calibration` names {name}, but {key} does not exist")
    return {**keys, "calibration": calibration_of_file(name, data)}


def _read_start(deployment: Deployment, key: str, num_bytes: int) -> Operation[bytes | None]:
    """Return the first bytes of an object, which may be empty; None if it does not exist."""
    found = yield from deployment.bucket.head(key)
    if found is None or not found["ContentLength"]:
        return None if found is None else b""
    return (yield from deployment.bucket.get_range(key, 0, num_bytes))


_AFTER_SECONDS = LOCK_SECONDS + 5
_FIRST = str(WorkUnit(Phase.SCAN, 0))


def ingest(
    aws: Aws,
    deployment: Deployment,
    batch: Batch,
    time_left: Callable[[], float],
    *,
    now: Callable[[], float] = time.time,
    chunk_bytes: int = CHUNK_BYTES,
    is_patient: bool = True,
    owner: str | None = None,
) -> Batch:
    """Bring a batch that is validating to `in_progress` or `failed`, or as far as one run can.

    `time_left` returns the seconds until the run's deadline. Returns the current batch when that is
    done, or when messages for the rest are sent: then `validating` is announced, or by the reaper
    after a crash. A run that is not patient leaves everything but short JSONL to others. `owner` is
    the owner of the lock with which this run has created the batch.
    """
    if not is_patient and batch.source.num_bytes > SHORT_BYTES:
        aws.run(_leave(deployment, batch))
        return batch
    lock = BatchLock(aws, deployment, batch, time_left, now, owner=owner or uuid4().hex)
    if not lock.acquire():
        logger.info("another run has the batch", batch_id=batch.id)
        # The lock's holder announces the status. If it has died, the next run waits for the lock.
        aws.run(_send(deployment, lock.batch, _AFTER_SECONDS))
        return lock.batch
    delay_seconds: float | None = None
    try:
        _ingest_counted(lock, chunk_bytes, is_patient=is_patient)
    except Requeue as exc:
        delay_seconds = exc.delay_seconds
    except LockLost as exc:
        logger.info("intake stops", batch_id=batch.id, reason=str(exc))
        delay_seconds = 0.0
    finally:
        begun = lock.batch
        if lock.is_held:
            lock.release()
    if begun.conversion is not None and lock.batch.status is not Status.VALIDATING:
        abort_conversion(aws, deployment, begun)
    # Released first: the receiver of the message must find the lock free.
    if delay_seconds is not None:
        aws.run(_leave(deployment, lock.batch, delay_seconds))
    return lock.batch


def _leave(deployment: Deployment, batch: Batch, delay_seconds: float = 0.0) -> Operation[None]:
    """Announce a batch that stays `validating`, then send the message for the next run.

    The announcement comes first, because that run announces the next status.
    """
    if batch.status is Status.VALIDATING:
        yield from announce(deployment, batch)
    yield from _send(deployment, batch, delay_seconds)


def _send(deployment: Deployment, batch: Batch, delay_seconds: float = 0.0) -> Operation[None]:
    """Send the message for the next run."""
    message = intake_message(batch.id)
    yield from deployment.intake.send(message, group=batch.tenant, delay_seconds=delay_seconds)


def _ingest_counted(lock: BatchLock, chunk_bytes: int, *, is_patient: bool) -> None:
    """Ingest, and count an exception: the last one that counts ends the batch instead."""
    try:
        _ingest(lock, chunk_bytes, is_patient=is_patient)
    except HandlerError:
        raise
    except Exception as exc:
        if not is_ended_by_failure(lock.aws, lock.deployment, lock.batch, lock.now(), exc):
            raise


def _ingest(lock: BatchLock, chunk_bytes: int, *, is_patient: bool) -> None:
    batch = lock.batch
    if batch.status is not Status.VALIDATING:
        return
    if batch.errors:
        verdict = Verdict(batch.num_errors, batch.errors)
        fail_batch(lock.aws, lock.deployment, batch, verdict, lock.now())
        return
    try:
        with refusing_bad_input():
            form = _ensure_jsonl(lock, is_patient=is_patient)
        reading = _get_progress(lock, form)
        # Not a file whose units already have messages, or that has made progress.
        is_short = reading.num_ranges == 1 and not reading.is_rung and _FIRST in reading.left
        if not (is_short and _ingest_at_once(lock, reading, chunk_bytes)):
            advance_phase(lock, reading)
    except FileRefused as exc:
        fail_batch(lock.aws, lock.deployment, batch, exc.verdict, lock.now())


def _ensure_jsonl(lock: BatchLock, *, is_patient: bool) -> FileFormat:
    """Return the file's format once its source is plain JSONL; raises FormatError, Requeue."""
    batch = lock.batch
    if batch.conversion is None and batch.retry is not None:
        batch = _start_conversion(lock, *_of_retry(lock, batch))
    elif batch.conversion is None:
        head = lock.aws.run(read_range(batch.source, 0, min(HEAD_BYTES, batch.source.num_bytes)))
        recipe = None
        if batch.options.table_recipe is not None or not begins_with_request(head):
            recipe = lock.aws.run(find_recipe(lock.deployment, batch, head, lock.now()))
        is_table = recipe is not None
        if is_table and batch.options.echo_fields:
            raise InvalidOption(ECHO_OF_TABLE, param="echo_fields")
        form = FileFormat(is_table=True) if is_table else detect_format(head, batch.endpoint)
        if form.is_plain:
            return form
        batch = _start_conversion(lock, form, recipe)
    assert batch.conversion is not None
    if batch.original is None:
        if not is_patient:
            raise Requeue
        convert_to_jsonl(lock, batch.conversion)
    return batch.conversion.form


def _of_retry(lock: BatchLock, batch: Batch) -> tuple[FileFormat, TableRecipe | None]:
    """Return the format of the retried batch's input, and its recipe with the edited prompt."""
    from ..inputs.request_lines import retried_batch  # late: most batches retry nothing

    conversion = retried_batch(lock.aws, lock.deployment, batch).conversion
    if conversion is None or conversion.recipe is None:
        return FileFormat() if conversion is None else conversion.form, None
    from tidemill.batch.table.recipe import overridden, parse_recipe  # late: most are not tables

    assert batch.retry is not None
    edits = {} if batch.retry.prompt is None else {"prompt": batch.retry.prompt}
    keys = overridden(json.loads(conversion.recipe), edits)
    parse_recipe(keys, may_escalate=True)
    return conversion.form, TableRecipe(json.dumps(keys, ensure_ascii=False), "", None)


def _start_conversion(lock: BatchLock, form: FileFormat, recipe: TableRecipe | None) -> Batch:
    if recipe is not None and lock.batch.retry is None:
        made = table_key(lock.batch.outputs, recipe.output)
        escalation = None if recipe.escalation is None else dump(recipe.escalation)
        outputs = dump(replace(lock.batch.outputs, table_key=made))
        lock.change(outputs=outputs, escalation=escalation, options=_with_priority(lock, recipe))
    batch, bucket = lock.batch, lock.deployment.bucket
    key = converted_key(batch.id)
    upload = lock.aws.run(bucket.create_work_upload(key))
    begun = dump(Conversion(form, upload, recipe=None if recipe is None else recipe.keys))
    chosen = lock.aws.run(lock.deployment.table.set_once(batch.id, "conversion", begun))
    if chosen != begun:
        lock.aws.run(bucket.abort_upload(key, begun["upload"]))
    lock.batch = replace(batch, conversion=load(Conversion, chosen))
    return lock.batch


def _with_priority(lock: BatchLock, recipe: TableRecipe) -> dict[str, Any]:
    """Return the batch's options, with the recipe's priority unless the batch has one."""
    options = lock.batch.options
    if recipe.priority is not None and options.priority is None:
        options = replace(options, priority=recipe.priority)
        lock.aws.run(lock.deployment.table.put_place(replace(lock.batch, options=options)))
    return dump(options)


def _get_progress(lock: BatchLock, form: FileFormat) -> IntakeProgress:
    """Return the intake progress, or its initial value."""
    batch, settings = lock.batch, lock.deployment.settings
    reading = new_progress(
        form,
        settings.shard_limits,
        batch.source.num_bytes,
        settings.range_bytes,
        batch.expires,
    )
    return lock.aws.run(lock.deployment.intake_progress.get_or_create(batch.id, reading))


def _ingest_at_once(lock: BatchLock, reading: IntakeProgress, chunk_bytes: int) -> bool:
    """Scan and record a file of one range; a run that dies leaves nothing that counts.

    Returns False, having done nothing, if the file has too many lines for one run.
    """
    aws, deployment, batch = lock.aws, lock.deployment, lock.batch
    scanner = make_scanner(
        aws, deployment, batch, reading, look=lock.check_active, chunk_bytes=chunk_bytes
    )
    survey = ScanSummary()
    with DuplicateFinder() as finder:
        with refusing_bad_input():
            scanned = scanner.scan(reading.range_of(0), finder)
            if scanned.end is not None:
                return False
            survey.add(WorkUnit(Phase.SCAN, 0), scanned)
        duplicates = finder.find(MAX_LISTED_ERRORS, lock.check_active)
    verdict = verdict_of(batch, reading, survey.findings, duplicates)
    if verdict.num_errors:
        raise FileRefused(verdict)
    reserve_lines(aws, deployment, batch, survey.findings)
    record_shards(
        aws,
        deployment,
        shards_of(batch.id, scanned.cuts, first=0, shift=0, expires=batch.expires),
    )
    start_batch(lock, survey)
    return True
