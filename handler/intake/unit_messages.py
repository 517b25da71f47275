"""Messages for work units of intake; a separate module, so that few Lambdas load the scanner."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.batch.intake_progress import IntakeProgress
from tidemill.batch.model import Batch

from ..aws.calls import Operation
from ..aws.queues import intake_message, message_batches
from ..deployment import Deployment


def unit_messages(batch: Batch, reading: IntakeProgress) -> Iterator[dict[str, object]]:
    """Yield the message for each remaining unit."""
    return (intake_message(batch.id, name) for name in sorted(reading.left))


def enqueue_again(
    deployment: Deployment, batch: Batch, reading: IntakeProgress | None, limit: int | None
) -> Operation[None]:
    """Send messages for the remaining units of a batch that is validating, at most `limit`."""
    yield from deployment.intake.send(intake_message(batch.id), group=batch.tenant)
    if reading is not None and (reading.is_rung or reading.num_ranges > 1):
        for messages in message_batches(list(unit_messages(batch, reading))[:limit]):
            yield from deployment.intake.send_all(messages, group=batch.tenant)
