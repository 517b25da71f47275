"""Handles one message about a file: one unit of its intake, or the next phase."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from tempfile import TemporaryFile

from tidemill.batch.batch_object import MAX_LISTED_ERRORS
from tidemill.batch.errors import HandlerError
from tidemill.batch.file.duplicate_ids import DuplicateFinder, Duplicates, Share, find_repeated
from tidemill.batch.intake_progress import IntakeProgress, Phase, WorkUnit
from tidemill.batch.model import Batch
from tidemill.batch.states import Status

from ..aws.calls import Operation
from ..aws.objects.stream import CHUNK_BYTES
from ..aws.queues import advance_message, intake_message
from ..aws.sync import Aws
from ..deployment import Deployment
from ..errors import ConditionFailed, NotThere
from ..lifecycle.batch_lock import LockLost
from ..observability import logger
from .control_messages import IntakeStep
from .convert import abort_conversion
from .failures import is_ended_by_failure
from .intake import ingest
from .phases import scans_of_unit
from .scan_store import ScanStore, read_each
from .scan_summary import ScanSummary, decode_offsets, offsets_range, shards_of
from .shards import enqueue_shards, record_shards
from .verdict import FileRefused, fail_batch, make_scanner, refusing_bad_input


def search_duplicates(
    aws: Aws, found: ScanStore, survey: ScanSummary, number: int, look: Callable[[], None]
) -> Duplicates:
    """Return the repeated IDs of one share; `look` is called about every second."""
    scans = [WorkUnit.named(name) for name in survey.scans]
    share = Share.nth(number, survey.num_shares)
    rows = decode_offsets(aws.run(found.get_places(*offsets_range(share, len(scans)))), len(scans))

    def data_of(number: int) -> Operation[bytes]:
        return _ids_of(found, scans[number], rows[0][number], rows[-1][number])

    ids = list(read_each(aws, data_of, len(scans), look))
    repeated = Duplicates()
    for start, end in pairwise(rows):
        pieces = _pieces(ids, rows[0], start, end)
        numbered = _checking(zip(pieces, survey.shifts, strict=True), look)
        in_partition = find_repeated(numbered, share.slice_number, share.num_slices)
        repeated = repeated.plus(in_partition, MAX_LISTED_ERRORS)
    return repeated


def _ids_of(found: ScanStore, unit: WorkUnit, start: int, end: int) -> Operation[bytes]:
    if end == start:
        return b""
    data = yield from found.get_ids(unit, start, end)
    if len(data) != end - start:
        raise HandlerError(f"the IDs of {unit} end before byte {end:,}")
    return data


def _pieces(
    ids: Iterable[bytes], base: array[int], start: array[int], end: array[int]
) -> Iterator[bytes]:
    """Yield the bytes of one partition, scan by scan."""
    for data, zero, first, last in zip(ids, base, start, end, strict=True):
        yield data[first - zero : last - zero]


def _checking(
    pieces: Iterable[tuple[bytes, int]], look: Callable[[], None]
) -> Iterator[tuple[bytes, int]]:
    for piece in pieces:
        look()
        yield piece


_CHECK_EVERY_SECONDS = 5.0


def run_unit(
    aws: Aws,
    deployment: Deployment,
    step: IntakeStep,
    time_left: Callable[[], float],
    *,
    now: Callable[[], float] = time.time,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Do one unit of a batch's intake, and start the next phase if it was the last of its phase.

    Idempotent. The run that finishes the intake sends the messages for its shards.
    """
    batch = aws.run(deployment.table.get_batch(step.batch_id))
    if batch is None:
        logger.warning("no such batch", batch_id=step.batch_id)
        return
    if batch.status is Status.VALIDATING and batch.expires_at <= now():
        aws.run(deployment.control.send(advance_message(batch.id), group=batch.tenant))
        return
    if batch.status is Status.VALIDATING:
        one = _UnitRun(aws, deployment, batch, now, chunk_bytes)
        is_due = not step.unit or one.do(WorkUnit.named(step.unit))
        if not is_due:
            return
        batch = ingest(aws, deployment, batch, time_left, now=now, chunk_bytes=chunk_bytes)
    if batch.status is Status.IN_PROGRESS and batch.shards_rung < batch.num_shards:
        enqueue_shards(aws, deployment, batch, time_left)
    elif batch.is_terminal:
        abort_conversion(aws, deployment, batch)


@dataclass(slots=True)
class _UnitRun:
    """One run with one unit; it takes no lock, because other runs do units of the same batch."""

    aws: Aws
    deployment: Deployment
    batch: Batch
    now: Callable[[], float]
    chunk_bytes: int
    _checked_at: float = 0.0

    def do(self, unit: WorkUnit) -> bool:
        """Do a unit unless it is done, and return whether work remains after it."""
        deployment, batch = self.deployment, self.batch
        reading = self.aws.run(deployment.intake_progress.get_progress(batch.id))
        if reading is None:
            return True
        if str(unit) not in reading.left:
            # A run may have done it and died before it sent the messages for the next ones.
            return not (reading.left and reading.is_rung)
        self._checked_at = self.now()
        try:
            if not self._counted(unit, reading):
                return False
            if batch.failing_since is not None:
                change = deployment.table.change_batch(batch.id, batch.status, failing_since=None)
                self.aws.run(change)
            return not self.aws.run(deployment.intake_progress.complete_unit(batch.id, unit)).left
        except FileRefused as exc:
            fail_batch(self.aws, deployment, batch, exc.verdict, self.now())
            return False
        except LockLost as exc:
            logger.info("intake stops", batch_id=batch.id, reason=str(exc))
            self.aws.run(deployment.control.send(advance_message(batch.id), group=batch.tenant))
            return False
        except (ConditionFailed, NotThere):
            # If the batch has ended in the meantime, everything may have been erased.
            latest = self.aws.run(deployment.table.get_batch(batch.id))
            if latest is not None and latest.status is Status.VALIDATING:
                raise
            logger.info("intake stops", batch_id=batch.id, reason="the batch has ended")
            return False

    def _counted(self, unit: WorkUnit, reading: IntakeProgress) -> bool:
        """Do a unit, and return whether it finished; False once its failures end the batch."""
        try:
            self._do(unit, reading)
        except HandlerError:
            raise
        except Exception as exc:
            if not is_ended_by_failure(self.aws, self.deployment, self.batch, self.now(), exc):
                raise
            return False
        return True

    def _do(self, unit: WorkUnit, reading: IntakeProgress) -> None:
        match unit.phase:
            case Phase.SCAN | Phase.AGAIN:
                self._scan(unit, reading)
            case Phase.SEARCH:
                found = ScanStore(self.deployment, self.batch.id)
                survey = self.aws.run(found.get_survey())
                repeated = search_duplicates(
                    self.aws, found, survey, unit.number, self._check_active
                )
                self.aws.run(found.put_duplicates(unit, repeated))
            case Phase.RECORD:
                self._record(unit)

    def _scan(self, unit: WorkUnit, reading: IntakeProgress) -> None:
        found = ScanStore(self.deployment, self.batch.id)
        scanner = make_scanner(
            self.aws,
            self.deployment,
            self.batch,
            reading,
            look=self._check_active,
            chunk_bytes=self.chunk_bytes,
        )
        with DuplicateFinder() as finder, TemporaryFile() as saved:
            span = self.aws.run(_span(found, unit, reading))
            with refusing_bad_input():
                scanned = scanner.scan(span, finder, reading.model)
            if unit.phase is Phase.SCAN:
                scanned.ids = finder.save(saved)
                saved.seek(0)
                self.aws.run(found.put_ids(unit, saved))
        self.aws.run(found.put_scanned(unit, scanned))
        if unit.phase is Phase.SCAN and scanned.end is not None:
            self._leave(unit.rest)

    def _leave(self, unit: WorkUnit) -> None:
        """Send a message so that another run continues a range."""
        batch, deployment = self.batch, self.deployment
        self.aws.run(deployment.intake_progress.add_unit(batch.id, unit))
        message = intake_message(batch.id, str(unit))
        self.aws.run(deployment.intake.send(message, group=batch.tenant))

    def _record(self, unit: WorkUnit) -> None:
        found = ScanStore(self.deployment, self.batch.id)
        survey = self.aws.run(found.get_survey())
        for number in scans_of_unit(survey, unit.number):
            self._check_active()
            scanned = self.aws.run(found.get_scanned(WorkUnit.named(survey.scans[number])))
            shards = shards_of(
                self.batch.id,
                scanned.cuts,
                first=survey.first_shards[number],
                shift=survey.shifts[number],
                expires=self.batch.expires,
            )
            record_shards(self.aws, self.deployment, shards)

    def _check_active(self) -> None:
        """Check every few seconds whether the batch is still validating; raises LockLost."""
        if self.now() - self._checked_at < _CHECK_EVERY_SECONDS:
            return
        self._checked_at = self.now()
        batch = self.aws.run(self.deployment.table.get_batch(self.batch.id))
        if batch is None or batch.status is not Status.VALIDATING:
            raise LockLost(f"{self.batch.id} is no longer validating")
        if batch.expires_at <= self.now():
            raise LockLost(f"the window of {batch.id} has ended")


def _span(found: ScanStore, unit: WorkUnit, reading: IntakeProgress) -> Operation[tuple[int, int]]:
    """Return the bytes that a scan reads: a range, or the part that its predecessor has left."""
    start, end = reading.range_of(unit.number)
    scan = replace(unit, phase=Phase.SCAN)
    if unit.part:
        before = yield from found.get_scanned(replace(scan, part=unit.part - 1))
        start = before.end if before.end is not None else end
    if unit.phase is Phase.AGAIN:
        first = yield from found.get_scanned(scan)
        end = first.end if first.end is not None else end
    return start, end
