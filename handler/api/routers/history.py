"""`/v1/batches/{id}/history`: a batch's progress over time, for plots."""

from __future__ import annotations

from typing import Literal

from aws_lambda_powertools.event_handler.router import APIGatewayHttpRouter
from pydantic import BaseModel

from tidemill.batch.progress import HistoryBucket

from ...deployment import deployment
from ..envelope.caller import aws
from .batches import kept_batch

router = APIGatewayHttpRouter()  # type: ignore[no-untyped-call]


class HistoryObject(BaseModel):
    """Rows, tokens and audio by time; periods without a row are left out."""

    object: Literal["list"] = "list"
    data: list[HistoryBucket]


@router.get("/v1/batches/<batch_id>/history")
def list_history(batch_id: str) -> HistoryObject:
    """Return a batch's progress per minute, or per quarter of an hour for an older batch."""
    batch = kept_batch(router.context, batch_id)
    return HistoryObject(data=aws().run(deployment().ledger.list_history(batch.id)))
