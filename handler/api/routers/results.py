"""`/v1/batches/{id}/results`: finished rows by their lines, while a batch runs and after."""

from __future__ import annotations

from functools import cache
from http import HTTPStatus
from typing import Annotated

from aws_lambda_powertools.event_handler.openapi.params import Query
from aws_lambda_powertools.event_handler.router import APIGatewayHttpRouter

from handler.api.envelope.errors import ComeAgain, Refused
from handler.api.envelope.means import aws
from handler.api.routers.batches import own_batch
from handler.batch.results_object import (
    MAX_LINE,
    MAX_LISTED_ROWS,
    ResultRow,
    ResultsObject,
    result_row,
    where_rows_are,
)
from handler.deployment import deployment
from handler.reading.finder import NotIndexed, WorkGone
from handler.reading.part_cache import PartCache
from handler.reading.results import MAX_BYTES, read_results

router = APIGatewayHttpRouter()  # type: ignore[no-untyped-call]
part_cache = cache(PartCache)


class Gone(Refused):
    """Something that was there and is no longer kept."""

    code = WorkGone.code
    status = HTTPStatus.GONE


@router.get("/v1/batches/<batch_id>/results")
def list_results(
    batch_id: str,
    after_line: Annotated[int, Query(ge=0, le=MAX_LINE)] = 0,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED_ROWS)] = 100,
) -> ResultsObject:
    """List the rows behind a line that are finished; they are here seconds after they were made."""
    batch = own_batch(router.context, batch_id)
    try:
        found = read_results(
            aws(), deployment(), batch, part_cache(), after_line=after_line, limit=limit
        )
    except WorkGone as exc:
        raise Gone(where_rows_are(batch)) from exc
    except NotIndexed as exc:
        words = "There are too many parts to look at in one request; ask again."
        raise ComeAgain(words, code=exc.code) from exc
    return ResultsObject(
        data=[_shown(line, row) for line, row in found.rows],
        complete_through=found.complete_through,
        has_more=found.has_more,
    )


def _shown(line: int, row: bytes | None) -> ResultRow:
    if row is None:
        words = f"The row has more than {MAX_BYTES:,} bytes: it is in the files of the batch only."
        return ResultRow(line=line, error={"code": "row_too_large", "message": words})
    return result_row(line, row)
