"""Erasure: a client requests it for an ended batch; `control.erase` does it in a Lambda."""

from __future__ import annotations

from tidemill.batch.errors import HandlerError
from tidemill.batch.model import Batch
from tidemill.batch.object_keys import result_file_id
from tidemill.batch.result_kinds import KINDS

from ..aws.calls import Operation
from ..aws.queues import advance_message
from ..deployment import Deployment
from ..observability import logger


class NotErasable(HandlerError):
    """A batch that cannot be erased now; `code` identifies the reason."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class BatchErased(HandlerError):
    """A batch that was or is being erased: only its tombstone is shown."""

    code = "batch_erased"

    def __init__(self, batch: Batch) -> None:
        super().__init__(f"Batch {batch.id} was erased.")


def request_erasure(deployment: Deployment, batch: Batch, now: int) -> Operation[Batch]:
    """Mark an ended batch for erasure and return it; from now on clients see only its tombstone.

    Idempotent; a repeated call sends the message again. Raises NotErasable.
    """
    if batch.erased_at is not None:
        return batch
    if not deployment.settings.erase_batches:
        raise NotErasable(
            "This deployment does not allow erasing batches: set `erase_batches = true` under "
            "[retention] in its configuration.",
            "erasing_not_allowed",
        )
    if batch.erasing_at is None:
        yield from _check_input(deployment, batch)
    erasing = yield from deployment.table.note_erasing(batch, now)
    if erasing.erasing_at is None:
        raise _why_not(erasing)
    names = [kind.file_id_of(batch) for kind in KINDS]
    current = [batch.table_file_id, *(kind.field(batch, "file_id") for kind in KINDS)]
    if batch.table_file_id is not None:  # a retry may have merged into another one
        names.append(result_file_id(batch.id, "table"))
    names += [file_id for file_id in current if file_id and file_id not in names]
    # The input of a retry belongs to the batch that it retries.
    inputs = [batch.input_file_id] if batch.retry is None else []
    for file_id in (*names, *inputs):
        file = yield from deployment.files.get_file(file_id)
        if file is not None and file.tenant == batch.tenant:
            yield from deployment.files.delete_file(file, now)
    yield from deployment.control.send(advance_message(batch.id), group=batch.tenant)
    logger.info("batch erasure requested", batch_id=batch.id)
    return erasing


def _why_not(batch: Batch) -> NotErasable:
    if batch.is_terminal:
        return NotErasable(
            f"The webhook of batch {batch.id} is still pending: erase the batch once "
            "`webhook` is `delivered` or `failed`, at most a day after its end.",
            "webhook_pending",
        )
    return NotErasable(
        f"Batch {batch.id} is {batch.status}: only an ended batch can be erased. Cancel it first.",
        "batch_not_ended",
    )


def _check_input(deployment: Deployment, batch: Batch) -> Operation[None]:
    """Raise NotErasable while another batch of the tenant reads the same input."""
    reader = yield from find_reader(deployment, batch)
    if reader is not None:
        raise NotErasable(
            f"Batch {reader.id} still reads the input of this batch: wait for it, or cancel it.",
            "input_in_use",
        )


def find_reader(deployment: Deployment, batch: Batch) -> Operation[Batch | None]:
    """Return another batch of the tenant that is reading the same input, or None."""
    active = yield from deployment.overview.list_active(batch.tenant, is_consistent=True)
    return next((it for it in active if it.id != batch.id and it.input == batch.input), None)
