"""Sweep: finds uploads without a batch, whose S3 events were lost.

It runs once a day, page by page. An upload that it finds may have a batch after all, or its event
may arrive later: the table deduplicates. Objects older than the window are skipped, because the
table may have forgotten their batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from tidemill.batch.object_keys import (
    INPUT_PREFIX,
    is_folder,
    is_of_table,
    outputs_of_drop,
    results_name,
)

from ..aws.bucket import ObjectHead
from ..aws.calls import Operation
from ..aws.queues import message_batches
from ..aws.stores.drops import is_known
from ..deployment import Deployment
from ..intake.control_messages import Drop, drop_message, sweep_message
from ..lifecycle.batch_lock import RESERVE_SECONDS
from ..observability import logger

# S3 dates an upload at its start, up to a week before its end; the sweep runs daily.
WINDOW_SECONDS = 8 * 24 * 3600
EVERY_SECONDS = 24 * 3600
# Younger uploads may still get their event.
SETTLED_SECONDS = 15 * 60


def sweep(
    deployment: Deployment, after: str, now: int, time_left: Callable[[], float]
) -> Operation[None]:
    """Send a message for every recent upload after a key that has no batch.

    Near the deadline a message continues the sweep. A repeated sweep sends messages for the same
    uploads again, until they have a batch.
    """
    num_found = 0
    while True:
        page, is_more = yield from deployment.bucket.list_page(INPUT_PREFIX, after)
        unknown = yield from _unknown(deployment, page, now)
        num_found += len(unknown)
        for drop in unknown:
            logger.warning("unknown upload found", key=drop.key)
        of_tenant: dict[str, list[Drop]] = defaultdict(list)
        for drop in unknown:
            of_tenant[deployment.settings.tenant_of_drop(drop.key)].append(drop)
        for tenant, drops in of_tenant.items():
            for messages in message_batches(map(drop_message, drops)):
                yield from deployment.drops.send_all(messages, group=tenant)
        if not (page and is_more):
            break
        after = page[-1].key
        if time_left() < RESERVE_SECONDS:
            yield from deployment.control.send(sweep_message(after), group=None)
            break
    logger.info("swept", num_found=num_found)


def _unknown(deployment: Deployment, page: Sequence[ObjectHead], now: int) -> Operation[list[Drop]]:
    """Return the recent objects without a batch."""
    bucket = deployment.bucket.name
    results = {
        found: outputs
        for found in page
        if now - WINDOW_SECONDS < found.modified <= now - SETTLED_SECONDS
        and not is_folder(found.key, found.num_bytes)
        and not is_of_table(found.key)
        and (outputs := outputs_of_drop(found.key)) is not None
    }
    known = yield from deployment.table.newest_drops(bucket, results.values())
    return [
        Drop(bucket, found.key, None, mark=f"{found.etag} {found.modified}")
        for found, outputs in results.items()
        if (newest := known.get(results_name(outputs))) is None
        or not is_known(newest, found.key, found.etag, found.modified)
    ]
