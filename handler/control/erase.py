"""Erases a batch: every version of its objects and its items in the table, but for a tombstone.

Only what is the batch's own goes: the version that it has read, and of results those that it has
written, as newer and older uploads of the same name have theirs under the same keys. Where such a
version is the newest a marker takes its place first, else the one before it would show again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from pydantic_core import from_json

from tidemill.batch.model import Batch
from tidemill.batch.object_keys import work_prefix
from tidemill.batch.result_kinds import KINDS

from ..aws.bucket import ObjectVersion
from ..aws.calls import Operation
from ..aws.queues import advance_message
from ..aws.sync import Aws
from ..deployment import Deployment
from ..errors import NotThere
from ..finalize.publish import BATCH_ID
from ..lifecycle.batch_lock import RESERVE_SECONDS
from ..observability import logger

_ITEMS_AT_ONCE = 500


def erase(
    aws: Aws,
    deployment: Deployment,
    batch: Batch,
    time_left: Callable[[], float],
    *,
    now: Callable[[], float] = time.time,
) -> None:
    """Erase a batch as far as the time allows; the rest is left to a message.

    Any run may do it, any number of times.
    """
    if batch.erasing_at is None or batch.erased_at is not None:
        return
    pages = _erase_work(aws, deployment, batch)
    while next(pages, None) is not None:
        if time_left() < RESERVE_SECONDS:
            aws.run(deployment.control.send(advance_message(batch.id), group=batch.tenant))
            return
    aws.run(_erase_own(deployment, batch.input.key, _is_input(batch)))
    for kind in KINDS:
        aws.run(_erase_own(deployment, kind.key_of(batch), _is_result(deployment, batch)))
    aws.run(_erase_own(deployment, batch.outputs.report_key, _is_report(deployment, batch)))
    aws.run(deployment.table.bury(replace(batch, erased_at=int(now()))))
    logger.info("batch erased", batch_id=batch.id)


def _erase_work(aws: Aws, deployment: Deployment, batch: Batch) -> Iterator[int]:
    """Delete work in flight and items, and yield how many after each page."""
    bucket, table = deployment.bucket, deployment.table
    while versions := aws.run(bucket.list_versions(work_prefix(batch.id)))[0]:
        aws.run(bucket.erase(versions))
        yield len(versions)
    while keys := aws.run(table.page_of_items(batch, _ITEMS_AT_ONCE)):
        aws.run_all(table.delete_item(key) for key in keys)
        yield len(keys)


_IsOwn = Callable[[ObjectVersion], Operation[bool]]


def _erase_own(deployment: Deployment, key: str, is_own: _IsOwn) -> Operation[None]:
    """Delete the versions of an object that are the batch's own."""
    bucket, after = deployment.bucket, None
    while True:
        versions, after = yield from bucket.list_versions(key, after)
        for version in versions:
            if version.key != key or version.is_marker or not (yield from is_own(version)):
                continue
            if version.is_latest:
                yield from bucket.delete_found(key, {"ETag": version.etag})
            yield from bucket.erase([version])
        if after is None or after["KeyMarker"] != key:
            return


def _is_input(batch: Batch) -> _IsOwn:
    source = batch.input

    def is_own(version: ObjectVersion) -> Operation[bool]:
        yield from ()
        return version.id == (source.version_id or "null") and version.etag == source.etag

    return is_own


def _is_result(deployment: Deployment, batch: Batch) -> _IsOwn:
    def is_own(version: ObjectVersion) -> Operation[bool]:
        found = yield from deployment.bucket.head(version.key, version.id)
        return found is not None and found["Metadata"].get(BATCH_ID) == batch.id

    return is_own


def _is_report(deployment: Deployment, batch: Batch) -> _IsOwn:
    def is_own(version: ObjectVersion) -> Operation[bool]:
        try:
            report = from_json((yield from deployment.bucket.get(version.key, version.id)))
        except (NotThere, ValueError):
            return False
        return isinstance(report, dict) and report.get("id") == batch.id

    return is_own
