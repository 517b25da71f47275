"""Intake phases: the steps between the work units of a file that many runs read.

The run that completes the last unit of a phase continues, under the batch's lock: it merges the
findings of all units, opens the next phase and sends a message for each of its units. If it dies,
the next run for the batch does the rest.
"""

from __future__ import annotations

from dataclasses import replace

from tidemill.batch.file.duplicate_ids import Duplicates
from tidemill.batch.intake_progress import IntakeProgress, Phase, WorkUnit

from ..aws.queues import message_batches
from ..lifecycle.batch_lock import BatchLock
from ..observability import logger
from .scan_store import ScanStore, merge_duplicates, read_scans
from .scan_summary import IdOffsets, ScanSummary, scans_of_other_models
from .unit_messages import unit_messages
from .verdict import FileRefused, refusing_bad_input, reserve_lines, start_batch, verdict_of

# One run records about 500 per second, and two of them reach the table's limit for one batch.
SHARDS_PER_RECORD = 200_000


def advance_phase(lock: BatchLock, reading: IntakeProgress) -> None:
    """Open the phases that are due, and send messages for the units of the open one.

    Raises FileRefused, LockLost.
    """
    readings, batch_id = lock.deployment.intake_progress, lock.batch.id
    while not reading.left:
        following = _next_phase(lock, reading)
        if following is None:
            return
        lock.renew()
        reading = lock.aws.run(readings.start_phase(batch_id, following, reading.phase))
        num_units = len(reading.left)
        logger.info(
            "intake phase opened", batch_id=batch_id, phase=reading.phase, num_units=num_units
        )
    if not reading.is_rung:
        for messages in message_batches(unit_messages(lock.batch, reading)):
            lock.check_active()
            lock.aws.run(lock.deployment.intake.send_all(messages, group=lock.batch.tenant))
        lock.aws.run(readings.note_enqueued(batch_id, reading.phase))


def scans_of_unit(survey: ScanSummary, number: int) -> list[int]:
    """Return the scans whose shards one unit records, by their places in the file."""
    first_shards = survey.first_shards[:-1]
    return [at for at, first in enumerate(first_shards) if first // SHARDS_PER_RECORD == number]


def _next_phase(lock: BatchLock, reading: IntakeProgress) -> IntakeProgress | None:
    """Return the phase after one whose units are all done; None when intake is complete."""
    if reading.phase is Phase.SEARCH:
        _conclude(lock, reading)
        return None
    return _summarise(lock, reading)


def _summarise(lock: BatchLock, reading: IntakeProgress) -> IntakeProgress:
    """Merge the results of all scans, and return the next phase."""
    found = ScanStore(lock.deployment, lock.batch.id)
    survey, places = ScanSummary(), IdOffsets()
    models: list[str | None] = []
    for unit, scanned in read_scans(lock.aws, found, reading, lock.check_active):
        with refusing_bad_input():
            survey.add(unit, scanned)
        places.add(scanned.ids)
        models.append(scanned.findings.model)
    if again := scans_of_other_models(models):
        wrong = [WorkUnit.named(survey.scans[number]) for number in again]
        units = [replace(unit, phase=Phase.AGAIN) for unit in wrong]
        return reading.in_phase(Phase.AGAIN, units, survey.findings.model)
    lock.renew()
    lock.aws.run(found.put_survey(survey, places))
    units = [WorkUnit(Phase.SEARCH, number) for number in range(survey.num_shares)]
    # The shards of an invalid file will never be run.
    if not verdict_of(lock.batch, reading, survey.findings, Duplicates()).num_errors:
        num_records = -(-survey.num_shards // SHARDS_PER_RECORD)
        units += [WorkUnit(Phase.RECORD, number) for number in range(num_records)]
    return reading.in_phase(Phase.SEARCH, units)


def _conclude(lock: BatchLock, reading: IntakeProgress) -> None:
    """Start the batch's shards; raises FileRefused."""
    aws, deployment, batch = lock.aws, lock.deployment, lock.batch
    found = ScanStore(deployment, batch.id)
    survey = aws.run(found.get_survey())
    duplicates = merge_duplicates(aws, found, survey.num_shares, lock.check_active)
    verdict = verdict_of(batch, reading, survey.findings, duplicates)
    if verdict.num_errors:
        raise FileRefused(verdict)
    reserve_lines(aws, deployment, batch, survey.findings)
    aws.run(deployment.table.forget_shards(batch.id, survey.num_shards))
    start_batch(lock, survey)
