"""Access to media in S3: a batch may name objects of its tenant in the deployment's bucket."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from tidemill.batch.file.lines import LineError, RawLine, parse_line
from tidemill.batch.file.rows import print_reply
from tidemill.batch.object_keys import media_prefix
from tidemill.batch.parts import FinishedRow
from tidemill.protocol.bodies import error_body
from tidemill.protocol.errors import RequestError
from tidemill.protocol.fetched_urls import fetched_urls
from tidemill.protocol.urls import is_object, parse_object_url

# A line without these bytes names no object: JSON escapes every ASCII character by the last one.
_SIGNS: Final = (b"s3:", b"S3:", rb"\u00")


def refuse_media(lines: Iterable[RawLine], tenant: str, bucket: str) -> dict[int, FinishedRow]:
    """Return the rows of those lines that name an object outside the tenant's media prefix."""
    rows = {}
    for raw in lines:
        if any(sign in raw.data for sign in _SIGNS):
            row = _refused(raw, tenant, bucket)
            if row is not None:
                rows[raw.number] = row
    return rows


def _refused(raw: RawLine, tenant: str, bucket: str) -> FinishedRow | None:
    try:
        line = parse_line(raw)
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
                code="fetch_failed",
            )
            row = print_reply(line, error.status_code, error_body(error))
            return FinishedRow(raw.number, row, is_success=False)
    return None
