"""Finds uploads that no batch knows, whatever became of the events that told of them.

Once a day, page by page. What it sends for may be known all the same, or told of by its own event
later: the table makes one batch of it. Of an object that is older than the window nothing is done,
for the table may have forgotten its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from handler.aws.bucket import Found
from handler.aws.calls import Operation
from handler.aws.queues import tens
from handler.aws.stores.drops import is_known
from handler.batch.keys import (
    DROP_TENANT,
    INPUT_PREFIX,
    is_folder,
    name_of_results,
    outputs_of_drop,
)
from handler.deployment import Deployment
from handler.intake.events import Drop, drop_message, sweep_message
from handler.log import logger
from handler.moves.turn import RESERVE_SECONDS

# S3 dates an upload at its beginning, which may be a week before its end; a sweep comes each day.
WINDOW_SECONDS = 8 * 24 * 3600
EVERY_SECONDS = 24 * 3600
# Until then an event is not late.
SETTLED_SECONDS = 15 * 60


def sweep(
    deployment: Deployment, after: str, now: int, time_left: Callable[[], float]
) -> Operation[None]:
    """Send for every recent upload behind a key that nobody knows; the rest is left to a message.

    Repeated it sends for the same uploads again, until they are known.
    """
    num_found = 0
    while True:
        page, is_more = yield from deployment.bucket.list_page(INPUT_PREFIX, after)
        unknown = yield from _unknown(deployment, page, now)
        num_found += len(unknown)
        for drop in unknown:
            logger.warning("upload found that nobody knew", key=drop.key)
        for messages in tens(drop_message(drop) for drop in unknown):
            yield from deployment.control.send_all(messages, group=DROP_TENANT)
        if not (page and is_more):
            break
        after = page[-1].key
        if time_left() < RESERVE_SECONDS:
            yield from deployment.control.send(sweep_message(after), group=None)
            break
    logger.info("swept", num_found=num_found)


def _unknown(deployment: Deployment, page: Sequence[Found], now: int) -> Operation[list[Drop]]:
    """Return those of the objects that are recent and have no batch."""
    bucket = deployment.bucket.name
    results = {
        found: outputs
        for found in page
        if now - WINDOW_SECONDS < found.modified <= now - SETTLED_SECONDS
        and not is_folder(found.key, found.num_bytes)
        and (outputs := outputs_of_drop(found.key)) is not None
    }
    known = yield from deployment.table.newest_drops(bucket, results.values())
    return [
        Drop(bucket, found.key, None, mark=f"{found.etag} {found.modified}")
        for found, outputs in results.items()
        if (newest := known.get(name_of_results(outputs))) is None
        or not is_known(newest, found.key, found.etag, found.modified)
    ]
