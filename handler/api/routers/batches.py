"""`/v1/batches`: create, list, read, cancel and erase batches."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

from aws_lambda_powertools.event_handler.openapi.params import Body, Header, Query
from aws_lambda_powertools.event_handler.router import APIGatewayHttpRouter

from tidemill.batch.batch_body import BatchRequest
from tidemill.batch.batch_object import BatchObject
from tidemill.batch.batch_request import parse_request
from tidemill.batch.model import Batch
from tidemill.batch.pagination import Page, make_page
from tidemill.batch.retry import NotRetryable
from tidemill.batch.retry_request import RetryRequest, parse_retry

from ...deployment import deployment
from ...errors import NotThere
from ...intake.new_batch import create_batch
from ...intake.retry_batch import create_retry
from ...lifecycle.cancel import NotCancellable, cancel
from ...lifecycle.erasure import BatchErased, NotErasable, request_erasure
from ...queries.batch_view import describe_batch
from ..envelope.caller import aws, tenant_of
from ..envelope.errors import Gone, NotFound, Refused

router = APIGatewayHttpRouter()  # type: ignore[no-untyped-call]

# Any other string cannot be an ID of ours, so the table is not queried (its keys have limits).
_ID: Final = re.compile(r"[\w-]{1,64}", re.ASCII)


# For each batch in a list; a single batch shows all stored errors. Lambda limits replies to 6 MB.
MAX_ERRORS_IN_LISTS: Final = 5


@router.post("/v1/batches")
def make_batch(
    request: Annotated[BatchRequest, Body()],
    key: Annotated[str | None, Header(alias="Idempotency-Key")] = None,
) -> BatchObject:
    """Create a batch from a file, or return the one created with the same idempotency key."""
    fields = request.fields()
    fields["idempotency_key"] = _idempotency_key(key, fields["idempotency_key"])
    tenant, parsed = tenant_of(router.context), parse_request(fields)
    try:
        batch = aws().run(create_batch(deployment(), tenant, parsed, int(time.time())))
    except BatchErased as exc:
        raise Gone(str(exc), code=exc.code) from exc
    return _batch_response(batch)


@router.get("/v1/batches")
def list_batches(
    limit: Annotated[int, Query(ge=1, le=100)] = 20, after: Annotated[str | None, Query()] = None
) -> Page[BatchObject]:
    """List the tenant's batches, newest first."""
    last = own_batch(router.context, after, param="after") if after is not None else None
    tenant = tenant_of(router.context)
    batches, has_more = aws().run(deployment().table.list_batches(tenant, limit=limit, after=last))
    return make_page(BatchObject, describe_batches(batches), has_more=has_more)


def describe_batches(batches: Iterable[Batch]) -> list[BatchObject]:
    """Return batches as lists show them."""
    now = time.time()
    return aws().run_all(
        describe_batch(deployment(), batch, now, max_errors=MAX_ERRORS_IN_LISTS)
        for batch in batches
    )


@router.get("/v1/batches/<batch_id>")
def retrieve_batch(batch_id: str) -> BatchObject:
    """Return one batch."""
    return _batch_response(own_batch(router.context, batch_id))


@router.post("/v1/batches/<batch_id>/cancel")
def cancel_batch(batch_id: str) -> BatchObject:
    """Cancel a batch; rows finished by then are retained."""
    own_batch(router.context, batch_id)
    try:
        batch = aws().run(cancel(deployment(), batch_id, int(time.time())))
    except NotCancellable as exc:
        raise Refused(str(exc), code=exc.code) from exc
    if batch is None:
        raise _unknown(batch_id, None)
    return _batch_response(batch)


@router.post("/v1/batches/<batch_id>/retry")
def retry_batch(
    batch_id: str,
    request: Annotated[RetryRequest, Body()],
    key: Annotated[str | None, Header(alias="Idempotency-Key")] = None,
) -> BatchObject:
    """Create a batch of the requests that failed or did not run, edited if requested."""
    old = kept_batch(router.context, batch_id)
    earlier = old.retry
    if earlier is not None:  # its rows are merged into those of the first batch
        old = kept_batch(router.context, earlier.of)
    params = parse_retry(old, request, earlier)
    key = _idempotency_key(key, request.idempotency_key)
    try:
        batch = aws().run(create_retry(deployment(), old, params, key, int(time.time())))
    except NotRetryable as exc:
        raise Refused(str(exc), code=exc.code) from exc
    except NotThere as exc:
        message = f"The input or the rows of batch {batch_id} were deleted: submit its file again."
        raise Gone(message, code="input_gone") from exc
    except BatchErased as exc:
        raise Gone(str(exc), code=exc.code) from exc
    return _batch_response(batch)


@router.delete("/v1/batches/<batch_id>")
def erase_batch(batch_id: str) -> BatchObject:
    """Erase an ended batch with its input, its results and its rows, permanently."""
    batch = own_batch(router.context, batch_id)
    try:
        batch = aws().run(request_erasure(deployment(), batch, int(time.time())))
    except NotErasable as exc:
        raise Refused(str(exc), code=exc.code) from exc
    return _batch_response(batch)


def kept_batch(context: Mapping[str, Any], batch_id: str) -> Batch:
    """Return a batch as `own_batch` does; raises Gone for one that was erased."""
    batch = own_batch(context, batch_id)
    if batch.erasing_at is not None:
        erased = BatchErased(batch)
        raise Gone(str(erased), code=erased.code)
    return batch


def own_batch(context: Mapping[str, Any], batch_id: str, param: str | None = None) -> Batch:
    """Return a batch of the caller's tenant; raises NotFound for any other."""
    is_id = _ID.fullmatch(batch_id) is not None
    batch = aws().run(deployment().table.get_batch(batch_id)) if is_id else None
    if batch is None or batch.tenant != tenant_of(context):
        raise _unknown(batch_id, param)
    return batch


def _idempotency_key(header: str | None, field: str | None) -> str | None:
    if header is not None and field not in (None, header):
        raise Refused(
            "`idempotency_key` and the header `Idempotency-Key` differ.",
            param="idempotency_key",
        )
    return header if header is not None else field


def _unknown(batch_id: str, param: str | None) -> NotFound:
    return NotFound(f"Batch {batch_id[:100]} not found.", param=param, code="batch_not_found")


def _batch_response(batch: Batch) -> BatchObject:
    return aws().run(describe_batch(deployment(), batch, time.time()))
