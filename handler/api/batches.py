"""`/v1/batches`: what runs, how far it is, and its end."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any, Final

from aws_lambda_powertools.event_handler.openapi.params import Query
from aws_lambda_powertools.event_handler.router import APIGatewayHttpRouter

from handler.api.caller import tenant_of
from handler.api.errors import NotFound, Refused
from handler.api.means import aws
from handler.aws.calls import Operation
from handler.batch.model import Batch
from handler.batch.wire import to_wire
from handler.cancel import NotCancellable, cancel
from handler.settings import deployment

router = APIGatewayHttpRouter()  # type: ignore[no-untyped-call]

# Whatever else is sent is no id of ours: the table, which has bounds of its own, is not asked.
_ID: Final = re.compile(r"[\w-]{1,64}", re.ASCII)


@router.get("/v1/batches")
def list_batches(
    limit: Annotated[int, Query(ge=1, le=100)] = 20, after: Annotated[str | None, Query()] = None
) -> dict[str, Any]:
    """List the tenant's batches, newest first."""
    last = _own(after, param="after") if after is not None else None
    tenant = tenant_of(router.current_event)
    batches, has_more = aws().run(deployment().table.list_batches(tenant, limit=limit, after=last))
    data = [_shown(batch) for batch in batches]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


@router.get("/v1/batches/<batch_id>")
def retrieve_batch(batch_id: str) -> dict[str, Any]:
    """Return one batch."""
    return _shown(_own(batch_id))


@router.post("/v1/batches/<batch_id>/cancel")
def cancel_batch(batch_id: str) -> dict[str, Any]:
    """Cancel a batch; the rows that are finished by then are kept."""
    _own(batch_id)
    try:
        batch = aws().run(cancel(deployment(), batch_id, int(time.time())))
    except NotCancellable as exc:
        raise Refused(str(exc), code=exc.code) from exc
    if batch is None:
        raise _unknown(batch_id, None)
    return _shown(batch)


def _own(batch_id: str, param: str | None = None) -> Batch:
    """Return a batch of the caller's tenant; raises NotFound for any other."""
    is_id = _ID.fullmatch(batch_id) is not None
    batch = aws().run(deployment().table.get_batch(batch_id)) if is_id else None
    if batch is None or batch.tenant != tenant_of(router.current_event):
        raise _unknown(batch_id, param)
    return batch


def _unknown(batch_id: str, param: str | None) -> NotFound:
    return NotFound(f"There is no batch {batch_id[:100]}.", param=param, code="batch_not_found")


def _shown(batch: Batch) -> dict[str, Any]:
    return aws().run(_to_wire(batch))


def _to_wire(batch: Batch) -> Operation[dict[str, Any]]:
    progress = batch.final or (yield from deployment().table.sum_progress(batch.id))
    return to_wire(batch, progress)
