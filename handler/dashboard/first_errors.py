"""First failed rows of a batch, for display."""

from __future__ import annotations

from typing import Final

from tidemill.batch.errors import BadPart
from tidemill.batch.model import Batch, Shard
from tidemill.batch.object_keys import part_prefix
from tidemill.batch.result_kinds import ERRORS
from tidemill.batch.stored_file import File
from tidemill.dashboard.failures import Failure, read_row

from ..aws.calls import Operation
from ..deployment import Deployment
from ..errors import NotThere

# Each row of a part needs a request to S3; those of an error file share one.
_MAX_READ: Final = 10
_MAX_BYTES: Final = 2**18
_MAX_SHARDS, _MAX_PARTS, _MAX_PAGES = 3, 10, 8
_HEAD_BYTES: Final = 2**15
_MAX_MESSAGES: Final = 2000
_messages: dict[tuple[str, str | None], str] = {}


def first_errors(deployment: Deployment, batch: Batch) -> Operation[list[Failure] | None]:
    """Return some of the first failed rows of a batch.

    None if they are not available (any more).
    """
    try:
        if batch.error_file_id is None and not batch.is_terminal:
            return (yield from _of_shards(deployment, batch))
        return (yield from _of_file(deployment, batch.error_file_id))
    except NotThere:
        return None


def first_message(deployment: Deployment, file: File) -> Operation[str]:
    """Return the first message of an error file; empty if it is gone or its first row is large.

    A version of an object never changes, so that a list that is refreshed reads it once.
    """
    place = (file.key, file.version_id)
    if place in _messages:
        return _messages[place]
    try:
        rows = yield from _of_object(deployment, *place, _HEAD_BYTES)
    except NotThere:
        return ""
    message = rows[0].message if rows else ""
    if file.version_id is not None:
        if len(_messages) >= _MAX_MESSAGES:
            _messages.clear()
        _messages[place] = message
    return message


def _of_shards(deployment: Deployment, batch: Batch) -> Operation[list[Failure]]:
    """Read failed rows of a few shards that are known to have some."""
    found: list[Failure] = []
    for shard in (yield from _failing(deployment, batch)):
        if shard.error_sizes:
            [first, *_] = ERRORS.segments_of(shard)
            found += yield from _of_object(deployment, first.key)
        else:
            found += yield from _of_parts(deployment, shard, _MAX_READ - len(found))
        if len(found) >= _MAX_READ:
            break
    return found


def _failing(deployment: Deployment, batch: Batch) -> Operation[list[Shard]]:
    """Return a few shards with failed rows, finished ones in order."""
    table = deployment.table
    standing = yield from table.get_shard_progress(batch)
    found: list[Shard] = []
    first: int | None = 0 if standing.done.failed else None
    for _ in range(_MAX_PAGES):
        if first is None or len(found) >= _MAX_SHARDS:
            break
        shards, first = yield from table.list_shards_page(batch.id, first)
        found += [shard for shard in shards if shard.error_sizes]
    for live in standing.live:
        if len(found) < _MAX_SHARDS and live.progress.failed:
            shard = yield from table.get_shard(batch.id, live.number)
            found += [shard] if shard else []
    return found[:_MAX_SHARDS]


def _of_parts(deployment: Deployment, shard: Shard, limit: int) -> Operation[list[Failure]]:
    """Read failed rows in a few parts of a running shard."""
    found: list[Failure] = []
    prefix = part_prefix(shard.batch_id, shard.number)
    keys = yield from deployment.bucket.list_keys(prefix)
    for key in keys[:_MAX_PARTS]:
        found += yield from _of_part(deployment, key, limit - len(found))
        if len(found) == limit:
            break
    return found


def _of_part(deployment: Deployment, key: str, limit: int) -> Operation[list[Failure]]:
    found: list[Failure] = []
    try:
        places = yield from deployment.bucket.read_head(key)
        failed = [place for place in places if not place.is_success]
        for place in failed[:limit]:
            end = min(place.end, place.start + _MAX_BYTES)
            row = read_row((yield from deployment.bucket.get_range(key, place.start, end)))
            found += [row] if row is not None else []
    except (BadPart, NotThere):
        pass
    return found


def _of_file(deployment: Deployment, file_id: str | None) -> Operation[list[Failure] | None]:
    file = (yield from deployment.files.get_file(file_id)) if file_id else None
    if file is None:
        return None
    return (yield from _of_object(deployment, file.key, file.version_id))


def _of_object(
    deployment: Deployment, key: str, version_id: str | None = None, num_bytes: int = _MAX_BYTES
) -> Operation[list[Failure]]:
    """Return the first rows of an object that contains only failed rows; raises NotThere."""
    head = yield from deployment.bucket.get_range(key, 0, num_bytes, version_id)
    # The bytes after the last newline may be the beginning of a row.
    *rows, _ = head.split(b"\n")
    return [row for row in map(read_row, rows) if row is not None]
