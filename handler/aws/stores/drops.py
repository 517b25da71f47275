"""Deduplication items of uploads: the newest upload of each results name, and its batch.

No I/O. An item outlives every event of the upload, so that no upload runs twice, whichever event
reports it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from tidemill.batch.model import Batch, Outputs
from tidemill.batch.object_keys import results_name

from .store import META

# SQS keeps a message for 14 days at most: every event of an upload comes before that.
EVENTS_END_SECONDS = 15 * 24 * 3600


class Arrival(NamedTuple):
    """Arrival of an upload: S3's sequencer, if its event contains one.

    `modified` (Unix seconds) is S3's too: the start of the upload, which may have taken days.
    """

    sequencer: str | None
    modified: int


def drop_key(bucket: str, outputs: Outputs) -> dict[str, object]:
    """Return the key of the item about uploads with these results."""
    return {"pk": f"DROP#{bucket}/{results_name(outputs)}", "sk": META}


def drop_item(batch: Batch, arrival: Arrival) -> dict[str, object]:
    """Return the item about the newest upload with its results."""
    source = batch.source
    return drop_key(source.bucket, batch.outputs) | {
        "batch_id": batch.id,
        "key": source.key,
        "etag": source.etag,
        "version_id": source.version_id,
        **arrival._asdict(),
        "expires": _expires(batch),
    }


def known_batch(newest: Mapping[str, Any], batch: Batch, arrival: Arrival) -> str | None:
    """Return the batch of this very upload, if the upload is the newest one.

    If a sweep found the upload without its event, the event comes late, or not at all.
    """
    source = batch.source
    is_same = newest["batch_id"] == batch.id or (
        None in {newest.get("sequencer"), arrival.sequencer}
        and newest.get("key") == source.key
        and newest.get("version_id") == source.version_id
        and newest.get("etag") == source.etag
        and (source.version_id is not None or newest.get("modified") == arrival.modified)
    )
    return str(newest["batch_id"]) if is_same else None


def is_overtaken(newest: Mapping[str, Any], batch: Batch, arrival: Arrival) -> bool:
    """Return whether an unknown upload is older than the newest one.

    Times decide if S3 has not reported an order; an item from before times were stored is newer.
    Within one second, the upload that a listing found is newer, because it is the key's current
    content. If two keys have the same results, the one whose event arrives last is newer.
    """
    is_same_key = newest.get("key", batch.source.key) == batch.source.key
    if arrival.sequencer is None:
        known_until = newest.get("modified", math.inf)
        if known_until != arrival.modified:
            return bool(known_until > arrival.modified)
        return not is_same_key
    if newest.get("sequencer") is None:
        return is_same_key and bool(newest["modified"] >= arrival.modified)
    return is_same_key and _rank(newest["sequencer"]) >= _rank(arrival.sequencer)


def is_known(newest: Mapping[str, Any], key: str, etag: str, modified: int) -> bool:
    """Return whether an object in the bucket needs no batch, by the newest upload's item."""
    # An object from before times were stored must not run again.
    known_until = newest.get("modified", math.inf)
    if known_until != modified:
        return bool(known_until > modified)
    return bool(newest["key"] != key or newest["etag"] == etag)


def _expires(batch: Batch) -> int | None:
    """Return the expiry: after every possible event, else a late one would run it again."""
    if batch.expires is None:
        return None
    return max(batch.expires, batch.created_at + EVENTS_END_SECONDS)


def _rank(sequencer: str) -> str:
    """Return a comparable sequencer: S3's are hexadecimal and of unequal length."""
    return sequencer.upper().ljust(64, "0")
