"""Verdict on a file: its scanner, its refusal, and the start of its batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tidemill.batch.allowed_media import AllowedMedia
from tidemill.batch.errors import HandlerError, InvalidOption
from tidemill.batch.file.duplicate_ids import Duplicates
from tidemill.batch.file.lines import FormatError
from tidemill.batch.intake_progress import IntakeProgress
from tidemill.batch.model import Batch, BatchError
from tidemill.batch.object_keys import is_drop
from tidemill.batch.states import Status
from tidemill.batch.table.errors import RecipeError, TableError
from tidemill.batch.validation import NOT_JSON, Findings, Verdict, judge, refuse
from tidemill.protocol.validation import printable

from ..aws.items import dump
from ..aws.sync import Aws
from ..deployment import Deployment
from ..errors import NotThere, ObjectChanged
from ..lifecycle.announce import announce
from ..lifecycle.batch_lock import BatchLock, LockLost
from ..lifecycle.finish import end_batch
from ..observability import logger
from .escalation import find_escalation_error
from .scan import Scanner
from .scan_summary import ScanSummary


class FileRefused(HandlerError):
    """Error of the whole file, which cannot be run whatever its lines are."""

    code = "file_refused"

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.errors[0].message)
        self.verdict = verdict


@contextmanager
def refusing_bad_input() -> Iterator[None]:
    """Raise FileRefused for an input that is missing, changed or in an unreadable format."""
    try:
        yield
    except NotThere as exc:
        raise _refused("input_gone", "The input was deleted before it was read.") from exc
    except ObjectChanged as exc:
        raise _refused(ObjectChanged.code, "The input was changed while it was read.") from exc
    except FormatError as exc:
        raise _refused(NOT_JSON, exc.message) from exc
    except InvalidOption as exc:
        raise _refused(exc.code, exc.message) from exc
    except TableError as exc:
        raise _refused(exc.code, str(exc)) from exc
    except RecipeError as exc:
        message = f"The recipe does not fit this table: {exc}."
        raise _refused(exc.code, message) from exc


def _refused(code: str, message: str) -> FileRefused:
    """Return the error of a file; a column's name in it may be long and contain surrogates."""
    return FileRefused(refuse(code, printable(message)))


def make_scanner(
    aws: Aws,
    deployment: Deployment,
    batch: Batch,
    reading: IntakeProgress,
    *,
    look: Callable[[], None],
    chunk_bytes: int,
) -> Scanner:
    """Return the scanner for the ranges of a batch's file."""
    # The endpoint that all URLs must match, if any: an upload does not name one.
    is_strict = deployment.settings.strict_endpoint and not is_drop(batch.outputs)
    return Scanner(
        aws,
        batch.source,
        reading.limits,
        reading.max_lines,
        deployment.models,
        batch.endpoint if is_strict else None,
        AllowedMedia(deployment.bucket.name, batch.tenant),
        look,
        chunk_bytes,
    )


def verdict_of(
    batch: Batch, reading: IntakeProgress, findings: Findings, duplicates: Duplicates
) -> Verdict:
    """Return the verdict on the whole file."""
    return judge(
        findings,
        duplicates,
        mistake=reading.form.suspicion,
        on_invalid_line=batch.options.on_invalid_line,
        strict_parameters=batch.options.strict_parameters,
        unit=reading.form.unit,
    )


def reserve_lines(aws: Aws, deployment: Deployment, batch: Batch, findings: Findings) -> None:
    """Count the lines of a valid file against its tenant's limit; FileRefused if they exceed it.

    Also raised if the batch has a `max_cost` and the price of its models' GPUs is unknown, or if
    its second model is unsuitable.
    """
    models = [findings.model]
    if batch.escalation is not None:
        models.append(batch.escalation.model)
        has_gold = batch.conversion is not None and batch.conversion.recipe is not None
        error = aws.run(
            find_escalation_error(deployment, batch.escalation, findings, has_gold=has_gold)
        )
        if error is not None:
            raise FileRefused(Verdict(1, (error,)))
    unpriced = next((each for each in models if not deployment.settings.gpu_hour_price(each)), None)
    if batch.options.max_cost is not None and unpriced is not None:
        words = f"`max_cost` requires the price of a GPU-hour of {unpriced!r}: "
        words += "set `gpu_hour_price` in the deployment's configuration."
        raise FileRefused(Verdict(1, (BatchError("no_gpu_hour_price", words, "max_cost"),)))
    excess = aws.run(deployment.limits.queue_lines(batch, findings.num_rows))
    if excess is not None:
        raise FileRefused(Verdict(1, (excess,)))


def fail_batch(
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


def start_batch(lock: BatchLock, survey: ScanSummary) -> None:
    """Start the batch's shards and release the lock, in one write.

    Raises LockLost if the batch was cancelled or has expired, or another run has its lock.
    """
    aws, deployment, batch = lock.aws, lock.deployment, lock.batch
    findings, num_shards = survey.findings, survey.num_shards
    moved = aws.run(
        deployment.table.move_batch(
            batch.id,
            Status.IN_PROGRESS,
            int(lock.now()),
            lock_owner=lock.owner,
            model=findings.model,
            endpoint=findings.endpoint if is_drop(batch.outputs) else batch.endpoint,
            num_rows=findings.num_rows,
            expected=dump(findings.expected),
            unknown_parameters=[dump(each) for each in findings.unknown.most_frequent()],
            num_shards=num_shards,
            shards_left=num_shards,
        )
    )
    if not moved.is_there or moved.batch is None:
        raise LockLost(f"{batch.id} is no longer validating, or another run has it")
    lock.batch = moved.batch
    logger.info(
        "file accepted",
        batch_id=batch.id,
        model=findings.model,
        num_rows=findings.num_rows,
        num_shards=num_shards,
    )
    aws.run(announce(deployment, moved.batch))
