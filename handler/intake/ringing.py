"""Rings for the units of a file that many runs read."""

from __future__ import annotations

from collections.abc import Iterator

from handler.aws.calls import Operation
from handler.aws.queues import intake_message, tens
from handler.batch.intake import Reading
from handler.batch.model import Batch
from handler.deployment import Deployment


def unit_messages(batch: Batch, reading: Reading) -> Iterator[dict[str, object]]:
    """Return what rings for each unit that is left."""
    return (intake_message(batch.id, name) for name in sorted(reading.left))


def ring_again(
    deployment: Deployment, batch: Batch, reading: Reading | None, limit: int | None
) -> Operation[None]:
    """Ring for what is left of a batch that is validating, for `limit` units of it at most."""
    yield from deployment.intake.send(intake_message(batch.id), group=batch.tenant)
    if reading is not None and (reading.is_rung or reading.num_ranges > 1):
        for messages in tens(list(unit_messages(batch, reading))[:limit]):
            yield from deployment.intake.send_all(messages, group=batch.tenant)
