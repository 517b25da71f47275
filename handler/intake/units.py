"""One message about a file: one unit of the work with it, or whatever comes next."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from tempfile import TemporaryFile

from engine.batchfile.duplicates import DuplicateFinder
from handler.aws.calls import Operation
from handler.aws.queues import advance_message, intake_message
from handler.aws.sync import Aws
from handler.batch.intake import Phase, Reading, Unit
from handler.batch.model import Batch
from handler.batch.states import Status
from handler.deployment import Deployment
from handler.intake.convert import give_up
from handler.intake.events import Intake
from handler.intake.file import FileRefused, fail, reading_input, scanner_of
from handler.intake.found import Found
from handler.intake.intake import take_in
from handler.intake.phases import records_of
from handler.intake.repeated import search
from handler.intake.shards import record, ring_shards
from handler.intake.survey import shards_of
from handler.log import logger
from handler.moves.turn import TurnLost
from handler.objects.stream import CHUNK_BYTES

_LOOK_EVERY_SECONDS = 5.0


def work_on(
    aws: Aws,
    deployment: Deployment,
    asked: Intake,
    time_left: Callable[[], float],
    *,
    now: Callable[[], float] = time.time,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Do one unit of a batch's intake, and what comes next if nothing else is left of its phase.

    Repeated it changes nothing. Whoever takes the batch in rings for its shards.
    """
    batch = aws.run(deployment.table.get_batch(asked.batch_id))
    if batch is None:
        logger.warning("no such batch", batch_id=asked.batch_id)
        return
    if batch.status is Status.VALIDATING and batch.expires_at <= now():
        aws.run(deployment.control.send(advance_message(batch.id), group=batch.tenant))
        return
    if batch.status is Status.VALIDATING:
        one = _Work(aws, deployment, batch, now, chunk_bytes)
        is_due = not asked.unit or one.do(Unit.named(asked.unit))
        if not is_due:
            return
        batch = take_in(aws, deployment, batch, time_left, now=now, chunk_bytes=chunk_bytes)
    if batch.status is Status.IN_PROGRESS and batch.shards_rung < batch.num_shards:
        ring_shards(aws, deployment, batch, time_left)
    elif batch.is_terminal:
        give_up(aws, deployment, batch)


@dataclass(slots=True)
class _Work:
    """One run with one unit; it has no turn, for others do units of the same batch meanwhile."""

    aws: Aws
    deployment: Deployment
    batch: Batch
    now: Callable[[], float]
    chunk_bytes: int
    _looked_at: float = 0.0

    def do(self, unit: Unit) -> bool:
        """Do a unit unless that was done, and say whether somebody has to go on from there."""
        deployment, batch = self.deployment, self.batch
        reading = self.aws.run(deployment.readings.get_reading(batch.id))
        if reading is None:
            return True
        if str(unit) not in reading.left:
            # Perhaps by a run that died before it had rung for the next ones.
            return not (reading.left and reading.is_rung)
        self._looked_at = self.now()
        try:
            self._do(unit, reading)
        except FileRefused as exc:
            fail(self.aws, deployment, batch, exc.verdict, self.now())
            return False
        except TurnLost as exc:
            logger.info("intake stops", batch_id=batch.id, reason=str(exc))
            self.aws.run(deployment.control.send(advance_message(batch.id), group=batch.tenant))
            return False
        if batch.failing_since is not None:
            change = deployment.table.change_batch(batch.id, batch.status, failing_since=None)
            self.aws.run(change)
        return not self.aws.run(deployment.readings.cross_off(batch.id, unit)).left

    def _do(self, unit: Unit, reading: Reading) -> None:
        match unit.phase:
            case Phase.SCAN | Phase.AGAIN:
                self._scan(unit, reading)
            case Phase.SEARCH:
                found = Found(self.deployment, self.batch.id)
                survey = self.aws.run(found.get_survey())
                repeated = search(self.aws, found, survey, unit.number, self._look)
                self.aws.run(found.put_duplicates(unit, repeated))
            case Phase.RECORD:
                self._record(unit)

    def _scan(self, unit: Unit, reading: Reading) -> None:
        found = Found(self.deployment, self.batch.id)
        scanner = scanner_of(
            self.aws,
            self.deployment,
            self.batch,
            reading,
            look=self._look,
            chunk_bytes=self.chunk_bytes,
        )
        with DuplicateFinder() as finder, TemporaryFile() as saved:
            span = self.aws.run(_span(found, unit, reading))
            with reading_input():
                scanned = scanner.scan(span, finder, reading.model)
            if unit.phase is Phase.SCAN:
                scanned.ids = finder.save(saved)
                saved.seek(0)
                self.aws.run(found.put_ids(unit, saved))
        self.aws.run(found.put_scanned(unit, scanned))
        if unit.phase is Phase.SCAN and scanned.end is not None:
            self._leave(unit.rest)

    def _leave(self, unit: Unit) -> None:
        """See that another run goes on with a range."""
        batch, deployment = self.batch, self.deployment
        self.aws.run(deployment.readings.add_unit(batch.id, unit))
        message = intake_message(batch.id, str(unit))
        self.aws.run(deployment.intake.send(message, group=batch.tenant))

    def _record(self, unit: Unit) -> None:
        found = Found(self.deployment, self.batch.id)
        survey = self.aws.run(found.get_survey())
        for number in records_of(survey, unit.number):
            self._look()
            scanned = self.aws.run(found.get_scanned(Unit.named(survey.scans[number])))
            shards = shards_of(
                self.batch.id,
                scanned.cuts,
                first=survey.first_shards[number],
                shift=survey.shifts[number],
                expires=self.batch.expires,
            )
            record(self.aws, self.deployment, shards)

    def _look(self) -> None:
        """See every few seconds whether the batch still wants its file read; raises TurnLost."""
        if self.now() - self._looked_at < _LOOK_EVERY_SECONDS:
            return
        self._looked_at = self.now()
        batch = self.aws.run(self.deployment.table.get_batch(self.batch.id))
        if batch is None or batch.status is not Status.VALIDATING:
            raise TurnLost(f"{self.batch.id} is no longer validating")
        if batch.expires_at <= self.now():
            raise TurnLost(f"the window of {batch.id} has ended")


def _span(found: Found, unit: Unit, reading: Reading) -> Operation[tuple[int, int]]:
    """Return which bytes a scan goes through: a range, or what the part before has left of it."""
    start, end = reading.range_of(unit.number)
    scan = replace(unit, phase=Phase.SCAN)
    if unit.part:
        before = yield from found.get_scanned(replace(scan, part=unit.part - 1))
        start = before.end if before.end is not None else end
    if unit.phase is Phase.AGAIN:
        first = yield from found.get_scanned(scan)
        end = first.end if first.end is not None else end
    return start, end
