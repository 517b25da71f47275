"""Media in S3: a batch may name objects of its tenant in the deployment's bucket.

A line whose objects could not be read, because S3 or the credentials failed, has not run.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic_core import from_json

from tidemill.batch.allowed_media import FETCH_FAILED, AllowedMedia, may_name_object
from tidemill.batch.file.lines import LineError, RawLine, parse_line
from tidemill.batch.file.rows import print_reply
from tidemill.batch.parts import FinishedRow
from tidemill.engine_process.frames import Row
from tidemill.protocol.bodies import error_body


def refuse_media(lines: Iterable[RawLine], allowed: AllowedMedia) -> dict[int, FinishedRow]:
    """Return the rows of those lines that name an object outside the tenant's media prefix.

    Intake has refused them, except in files whose invalid lines get error rows.
    """
    rows = {}
    for raw in lines:
        if may_name_object(raw.data):
            row = _refused(raw, allowed)
            if row is not None:
                rows[raw.number] = row
    return rows


def _refused(raw: RawLine, allowed: AllowedMedia) -> FinishedRow | None:
    try:
        line = parse_line(raw, in_slices=True)
    except LineError:
        return None  # the engine prints its row
    error = allowed.find_error(line.body)
    if error is None:
        return None
    row = print_reply(line, error.status_code, error_body(error))
    return FinishedRow(raw.number, row, is_success=False)


def is_unread(row: Row) -> bool:
    """Say whether a row's media could not be read through no fault of its line."""
    if row.is_success or FETCH_FAILED.encode() not in row.row:
        return False
    match from_json(row.row):
        case {"response": {"status_code": int(status), "body": {"error": {"code": code}}}}:
            return status >= 500 and code == FETCH_FAILED
    return False
