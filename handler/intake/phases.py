"""What comes between the units of a file that many runs read: the phases, one after another.

Whoever crosses off the last unit of a phase goes on, in its turn with the batch: it puts together
what the units have found, opens the next phase and rings for each of its units. What it had not
done when it died is done by the next run that hears of the batch.
"""

from __future__ import annotations

from dataclasses import replace

from engine.batchfile.duplicates import Duplicates
from handler.aws.queues import tens
from handler.batch.intake import Phase, Reading, Unit
from handler.intake.file import FileRefused, admit, let_run, reading_input, verdict_of
from handler.intake.found import Found, all_duplicates, all_scanned
from handler.intake.ringing import unit_messages
from handler.intake.survey import Places, Survey, of_another_model
from handler.log import logger
from handler.moves.turn import Run

# One run records some 500 a second, and two of them what the table takes for one batch.
SHARDS_PER_RECORD = 200_000


def go_on(run: Run, reading: Reading) -> None:
    """Open the phases that are due, and ring for the units of the one that is open.

    Raises FileRefused, TurnLost.
    """
    readings, batch_id = run.deployment.readings, run.batch.id
    while not reading.left:
        following = _next_phase(run, reading)
        if following is None:
            return
        run.keep_turn()
        reading = run.aws.run(readings.open_phase(batch_id, following, reading.phase))
        num_units = len(reading.left)
        logger.info("intake goes on", batch_id=batch_id, phase=reading.phase, num_units=num_units)
    if not reading.is_rung:
        for messages in tens(unit_messages(run.batch, reading)):
            run.stay()
            run.aws.run(run.deployment.intake.send_all(messages, group=run.batch.tenant))
        run.aws.run(readings.note_rung(batch_id, reading.phase))


def records_of(survey: Survey, number: int) -> list[int]:
    """Return the scans whose shards one unit records, by their places in the file."""
    first_shards = survey.first_shards[:-1]
    return [at for at, first in enumerate(first_shards) if first // SHARDS_PER_RECORD == number]


def _next_phase(run: Run, reading: Reading) -> Reading | None:
    """Return the phase behind one whose units are all done; None when the batch is through."""
    if reading.phase is Phase.SEARCH:
        _conclude(run, reading)
        return None
    return _survey(run, reading)


def _survey(run: Run, reading: Reading) -> Reading:
    """Put together what all scans have shown, and return what is to be done then."""
    found = Found(run.deployment, run.batch.id)
    survey, places = Survey(), Places()
    models: list[str | None] = []
    for unit, scanned in all_scanned(run.aws, found, reading, run.stay):
        with reading_input():
            survey.add(unit, scanned)
        places.add(scanned.ids)
        models.append(scanned.findings.model)
    if again := of_another_model(models):
        wrong = [Unit.named(survey.scans[number]) for number in again]
        units = [replace(unit, phase=Phase.AGAIN) for unit in wrong]
        return reading.in_phase(Phase.AGAIN, units, survey.findings.model)
    run.keep_turn()
    run.aws.run(found.put_survey(survey, places))
    units = [Unit(Phase.SEARCH, number) for number in range(survey.num_shares)]
    # The shards of a file that is known to be wrong will never be run.
    if not verdict_of(run.batch, reading, survey.findings, Duplicates()).num_errors:
        num_records = -(-survey.num_shards // SHARDS_PER_RECORD)
        units += [Unit(Phase.RECORD, number) for number in range(num_records)]
    return reading.in_phase(Phase.SEARCH, units)


def _conclude(run: Run, reading: Reading) -> None:
    """Let the shards be run; raises FileRefused."""
    aws, deployment, batch = run.aws, run.deployment, run.batch
    found = Found(deployment, batch.id)
    survey = aws.run(found.get_survey())
    duplicates = all_duplicates(aws, found, survey.num_shares, run.stay)
    verdict = verdict_of(batch, reading, survey.findings, duplicates)
    if verdict.num_errors:
        raise FileRefused(verdict)
    admit(aws, deployment, batch, survey.findings)
    aws.run(deployment.table.forget_shards(batch.id, survey.num_shards))
    let_run(aws, deployment, batch, survey, run.now())
