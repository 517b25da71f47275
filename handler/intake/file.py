"""What every run over a file needs: how its lines are looked at, and what it comes to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine.batchfile.duplicates import Duplicates
from engine.batchfile.lines import FormError
from handler.aws.sync import Aws
from handler.batch.check import NOT_JSON, Findings, Verdict, judge, refuse
from handler.batch.intake import Reading
from handler.batch.keys import is_drop
from handler.batch.model import Batch
from handler.batch.states import Status
from handler.deployment import Deployment
from handler.errors import HandlerError, NotThere, ObjectChanged
from handler.intake.scan import Scanner
from handler.intake.survey import Survey
from handler.log import logger
from handler.moves.announce import announce
from handler.moves.end import end_batch
from handler.moves.turn import TurnLost


class FileRefused(HandlerError):
    """The file cannot be run, whatever else stands in it."""

    code = "file_refused"

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.errors[0].message)
        self.verdict = verdict


@contextmanager
def reading_input() -> Iterator[None]:
    """Take an input that is gone, changed or of no form that can be read for a refused file."""
    try:
        yield
    except NotThere as exc:
        message = "The input was deleted before it was read."
        raise FileRefused(refuse("input_gone", message)) from exc
    except ObjectChanged as exc:
        message = "The input was changed while it was read."
        raise FileRefused(refuse(ObjectChanged.code, message)) from exc
    except FormError as exc:
        raise FileRefused(refuse(NOT_JSON, exc.message)) from exc


def scanner_of(
    aws: Aws,
    deployment: Deployment,
    batch: Batch,
    reading: Reading,
    *,
    look: Callable[[], None],
    chunk_bytes: int,
) -> Scanner:
    """Return what looks at the ranges of a batch's file."""
    # What the urls of all lines must mean, if anything: an upload does not say.
    is_strict = deployment.settings.strict_endpoint and not is_drop(batch.outputs)
    return Scanner(
        aws,
        batch.source,
        reading.limits,
        reading.max_lines,
        deployment.models,
        batch.endpoint if is_strict else None,
        look,
        chunk_bytes,
    )


def verdict_of(
    batch: Batch, reading: Reading, findings: Findings, duplicates: Duplicates
) -> Verdict:
    """Return what the whole file comes to."""
    return judge(
        findings,
        duplicates,
        mistake=reading.form.suspicion,
        on_invalid_line=batch.options.on_invalid_line,
        unit=reading.form.unit,
    )


def admit(aws: Aws, deployment: Deployment, batch: Batch, findings: Findings) -> None:
    """Count the lines of a good file against its tenant's limit; FileRefused where they pass it."""
    excess = aws.run(deployment.limits.queue_lines(batch, findings.num_rows))
    if excess is not None:
        raise FileRefused(Verdict(1, (excess,)))


def fail(
    aws: Aws, deployment: Deployment, batch: Batch, verdict: Verdict, now: float
) -> Batch | None:
    """End a batch whose file is refused."""
    logger.info("file refused", batch_id=batch.id, num_errors=verdict.num_errors)
    return end_batch(
        aws,
        deployment,
        batch.id,
        Status.FAILED,
        int(now),
        errors=verdict.errors,
        num_errors=verdict.num_errors,
    )


def let_run(aws: Aws, deployment: Deployment, batch: Batch, survey: Survey, now: float) -> None:
    """Let the shards be run; TurnLost if the batch has been cancelled or has expired meanwhile."""
    findings, num_shards = survey.findings, survey.num_shards
    moved = aws.run(
        deployment.table.move_batch(
            batch.id,
            Status.IN_PROGRESS,
            int(now),
            model=findings.model,
            endpoint=findings.endpoint if is_drop(batch.outputs) else batch.endpoint,
            num_rows=findings.num_rows,
            num_shards=num_shards,
            shards_left=num_shards,
        )
    )
    if not moved.is_there or moved.batch is None:
        raise TurnLost(f"{batch.id} is no longer validating")
    logger.info(
        "file taken in",
        batch_id=batch.id,
        model=findings.model,
        num_rows=findings.num_rows,
        num_shards=num_shards,
    )
    aws.run(announce(deployment, moved.batch))
