"""`/v1/batches/{id}/history`: a batch's progress over time, for plots."""

from __future__ import annotations

from aws_lambda_powertools.event_handler.router import APIGatewayHttpRouter

from tidemill.batch.history_object import HistoryObject

from ...deployment import deployment
from ..envelope.caller import aws
from .batches import kept_batch

router = APIGatewayHttpRouter()  # type: ignore[no-untyped-call]


@router.get("/v1/batches/<batch_id>/history")
def list_history(batch_id: str) -> HistoryObject:
    """Return a batch's progress per minute, or per quarter of an hour for an older batch."""
    batch = kept_batch(router.context, batch_id)
    return HistoryObject(data=aws().run(deployment().ledger.list_history(batch.id)))
