"""Media in S3: a batch may name objects of its tenant in the deployment's bucket.

A line whose objects could not be read, because S3 or the credentials failed, has not run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from pydantic_core import from_json

from tidemill.batch.file.lines import LineError, RawLine, parse_line
from tidemill.batch.file.rows import print_reply
from tidemill.batch.object_keys import media_prefix
from tidemill.batch.parts import FinishedRow
from tidemill.engine_process.frames import Row
from tidemill.protocol.bodies import error_body
from tidemill.protocol.errors import RequestError
from tidemill.protocol.fetched_urls import fetched_urls
from tidemill.protocol.urls import is_object, parse_object_url

# A line without this names no object. JSON may spell each character by its number.
_SIGN: Final = re.compile(
    rb"(?:[sS]|\\u00(?:53|73))(?:3|\\u0033)(?::|\\u003[aA])(?:\\?/|\\u002[fF])"
)
_FAILED: Final = "fetch_failed"


def refuse_media(lines: Iterable[RawLine], tenant: str, bucket: str) -> dict[int, FinishedRow]:
    """Return the rows of those lines that name an object outside the tenant's media prefix."""
    rows = {}
    for raw in lines:
        if _SIGN.search(raw.data):
            row = _refused(raw, tenant, bucket)
            if row is not None:
                rows[raw.number] = row
    return rows


def _refused(raw: RawLine, tenant: str, bucket: str) -> FinishedRow | None:
    try:
        line = parse_line(raw, in_slices=True)
    except LineError:
        return None  # the engine prints its row
    prefix = media_prefix(tenant)
    for place, url in fetched_urls(line.body).items():
        if not is_object(url):
            continue
        try:
            named, key = parse_object_url(url)
        except ValueError:
            continue  # the engine refuses it
        if named != bucket or not key.startswith(prefix):
            where = f"is in bucket {named}" if named != bucket else "has another prefix"
            error = RequestError(
                f"`{place}` {where}: a batch may only read s3://{bucket}/{prefix} here.",
                param=place,
                code=_FAILED,
            )
            row = print_reply(line, error.status_code, error_body(error))
            return FinishedRow(raw.number, row, is_success=False)
    return None


def is_unread(row: Row) -> bool:
    """Say whether a row's media could not be read through no fault of its line."""
    if row.is_success or _FAILED.encode() not in row.row:
        return False
    match from_json(row.row):
        case {"response": {"status_code": int(status), "body": {"error": {"code": code}}}}:
            return status >= 500 and code == _FAILED
    return False
