"""Erases a batch: every version of its objects and its items in the table, except a tombstone.

Only the batch's own versions are deleted: the input version that it read and the result versions
that it wrote, because older and newer uploads of the same name use the same keys. If such a
version is the newest, a delete marker is written first, else the version before it would show.

A run of intake, finalize or a worker may still write after its batch has ended. So everything is
checked once more when the last such run is over, and only then does the tombstone confirm it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from pydantic_core import from_json

from tidemill.batch.model import Batch
from tidemill.batch.object_keys import (
    INPUT_PREFIX,
    moved_outputs,
    results_prefix,
    upload_prefix,
    work_prefix,
)
from tidemill.batch.upload_object import UPLOAD_ID

from ..aws.bucket import ObjectVersion
from ..aws.calls import Operation
from ..aws.queues import LAMBDA_SECONDS, advance_message
from ..aws.sync import Aws
from ..deployment import Deployment
from ..errors import NotThere
from ..finalize.result_files import BATCH_ID
from ..lifecycle.batch_lock import RESERVE_SECONDS, Requeue
from ..lifecycle.erasure import find_reader
from ..observability import logger

_ITEMS_AT_ONCE = 500
# Clocks of S3 and Lambdas differ.
_CLOCK_SECONDS = 300

_IsOwn = Callable[[ObjectVersion], Operation[bool]]


def erase(
    aws: Aws,
    deployment: Deployment,
    batch: Batch,
    time_left: Callable[[], float],
    *,
    now: Callable[[], float] = time.time,
) -> None:
    """Erase a batch until the deadline; a message, or the reaper, continues.

    Any run may do it, any number of times.
    """
    if batch.erasing_at is None or batch.erased_at is not None:
        return
    quiet_at = max(batch.turn_until, batch.ended_at or batch.erasing_at) + LAMBDA_SECONDS
    wait_seconds = quiet_at - now()
    try:
        is_all = _Erasure(aws, deployment, batch, time_left, quiet_at).run()
        if wait_seconds > 0:
            raise Requeue(wait_seconds + 1)  # noqa: TRY301 - one end
    except Requeue as rest:
        message, seconds = advance_message(batch.id), rest.delay_seconds
        aws.run(deployment.control.send(message, group=batch.tenant, delay_seconds=seconds))
        return
    # Read again: its end may have been announced, or its lines released, since then.
    latest = aws.run(deployment.table.get_batch(batch.id))
    if not is_all or latest is None or latest.erased_at is not None:
        return
    if latest.announced is not latest.status or latest.queued_lines is not None:
        logger.info("batch not erased: its end is not announced yet", batch_id=batch.id)
        return
    aws.run(deployment.table.bury(replace(latest, erased_at=int(now()))))
    logger.info("batch erased", batch_id=batch.id)


@dataclass(frozen=True, slots=True)
class _Erasure:
    """One run through a batch's own objects and items; each step raises Requeue near the deadline.

    Nothing is written for the batch from `quiet_at` on (Unix seconds).
    """

    aws: Aws
    deployment: Deployment
    batch: Batch
    time_left: Callable[[], float]
    quiet_at: float

    def run(self) -> bool:
        """Delete everything but the batch's item, and return whether that is complete.

        An input stays while another batch reads it.
        """
        batch, aws, deployment = self.batch, self.aws, self.deployment
        self._erase_below(work_prefix(batch.id))
        self._erase_kept_results()
        while keys := aws.run(deployment.table.page_of_items(batch, _ITEMS_AT_ONCE)):
            aws.run_all(deployment.table.delete_item(key) for key in keys)
            self._check()
        results = [
            key
            for outputs in (batch.outputs, moved_outputs(batch.outputs, batch.tenant, batch.id))
            for key in (outputs.output_key, outputs.error_key, outputs.table_key)
        ]
        for result_key in dict.fromkeys(results):
            if result_key is not None:
                self._erase_own(result_key, self._while_it_ran(_is_result(deployment, batch)))
        is_report = self._while_it_ran(_is_report(deployment, batch))
        self._erase_own(batch.outputs.report_key, is_report)
        if batch.retry is not None:  # the input belongs to the retried batch
            return True
        # Checked again: another batch may have begun to read it since the request was accepted.
        reader = aws.run(find_reader(deployment, batch))
        if reader is not None:
            logger.info("input still read", batch_id=batch.id, reader=reader.id)
            return False
        self._erase_upload()
        self._erase_own(batch.input.key, _is_input(batch))
        return True

    def _check(self) -> None:
        if self.time_left() < RESERVE_SECONDS:
            raise Requeue

    def _erase_below(self, prefix: str) -> None:
        """Delete all versions of all objects with a prefix."""
        bucket = self.deployment.bucket
        while versions := self.aws.run(bucket.list_versions(prefix))[0]:
            self.aws.run(bucket.erase(versions))
            self._check()

    def _erase_kept_results(self) -> None:
        """Delete the packs of the batch's stored results, so that no later batch reuses them."""
        bucket, after = self.deployment.bucket, None
        while True:
            versions, after = self.aws.run(
                bucket.list_versions(results_prefix(self.batch.tenant), after)
            )
            own = [version for version in versions if f"/{self.batch.id}-" in version.key]
            if own:
                self.aws.run(bucket.erase(own))
            self._check()
            if after is None:
                return

    def _erase_upload(self) -> None:
        """Delete the parts in which an input was uploaded, and the upload's item."""
        source = self.batch.input
        if source.key.startswith(INPUT_PREFIX):  # uploaders choose the names below it
            return
        found = self.aws.run(self.deployment.bucket.head(source.key, source.version_id))
        upload_id = found["Metadata"].get(UPLOAD_ID) if found else None
        if upload_id:
            self._erase_below(upload_prefix(upload_id))
            self.aws.run(self.deployment.uploads.forget_upload(upload_id))

    def _while_it_ran(self, is_own: _IsOwn) -> _IsOwn:
        """Return the same query, restricted to versions from the time that the batch ran.

        Each upload of the name adds a version of the results, and each check costs a call.
        """
        since, until = self.batch.created_at - _CLOCK_SECONDS, self.quiet_at + _CLOCK_SECONDS

        def is_own_then(version: ObjectVersion) -> Operation[bool]:
            return since <= version.modified <= until and (yield from is_own(version))

        return is_own_then

    def _erase_own(self, key: str, is_own: _IsOwn) -> None:
        """Delete the batch's own versions of an object."""
        bucket, after = self.deployment.bucket, None
        while True:
            versions, after = self.aws.run(bucket.list_versions(key, after))
            for version in versions:
                if version.key != key or version.is_marker:
                    continue
                if self.aws.run(is_own(version)):
                    if version.is_latest:
                        self.aws.run(bucket.delete_found(key, {"ETag": version.etag}))
                    self.aws.run(bucket.erase([version]))
                self._check()
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
