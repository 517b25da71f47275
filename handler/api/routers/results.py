"""`/v1/batches/{id}/results`: finished rows by their lines, while a batch runs and after."""

from __future__ import annotations

from functools import cache
from typing import Annotated

from aws_lambda_powertools.event_handler.openapi.params import Query
from aws_lambda_powertools.event_handler.router import APIGatewayHttpRouter

from tidemill.batch.results_object import (
    MAX_LINE,
    MAX_LISTED_ROWS,
    ResultRow,
    ResultsObject,
    result_row,
    rows_deleted_message,
)

from ...deployment import deployment
from ...queries.part_cache import PartCache
from ...queries.results import MAX_BYTES, read_results
from ...queries.row_finder import NotIndexed, WorkGone
from ..envelope.caller import aws
from ..envelope.errors import Gone, NotFinished
from .batches import kept_batch

router = APIGatewayHttpRouter()  # type: ignore[no-untyped-call]
part_cache = cache(PartCache)


@router.get("/v1/batches/<batch_id>/results")
def list_results(
    batch_id: str,
    after_line: Annotated[int, Query(ge=0, le=MAX_LINE)] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED_ROWS)] = 100,
) -> ResultsObject:
    """List the finished rows after a line; they appear here seconds after they are produced."""
    batch = kept_batch(router.context, batch_id)
    try:
        found = read_results(
            aws(), deployment(), batch, part_cache(), after_line=after_line, limit=limit
        )
    except WorkGone as exc:
        raise Gone(rows_deleted_message(batch), code=WorkGone.code) from exc
    except NotIndexed as exc:
        words = "There are too many parts to read in one request; repeat the request."
        raise NotFinished(words, code=exc.code) from exc
    return ResultsObject(
        data=[_result_row(line, row) for line, row in found.rows],
        complete_through=found.complete_through,
        has_more=found.has_more,
    )


def _result_row(line: int, row: bytes | None) -> ResultRow:
    if row is None:
        words = f"The row has more than {MAX_BYTES:,} bytes: read it from the batch's files."
        return ResultRow(line=line, error={"code": "row_too_large", "message": words})
    return result_row(line, row)
