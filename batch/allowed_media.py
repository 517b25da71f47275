"""Media in S3 that a batch's lines may name: the objects under its tenant's media prefix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from tidemill.protocol.errors import RequestError
from tidemill.protocol.fetched_urls import fetched_urls
from tidemill.protocol.urls import is_object, parse_object_url

from .object_keys import media_prefix

FETCH_FAILED: Final = "fetch_failed"

# JSON may spell each character by its number. Without the letter in front the search is several
# times as fast.
_SIGN: Final = re.compile(rb"(?:3|\\u0033)(?::|\\u003[aA])(?:\\?/|\\u002[fF])")


class AllowedMedia(NamedTuple):
    """The bucket of a deployment and the tenant of a batch: its lines may name no other objects."""

    bucket: str
    tenant: str

    def find_error(self, body: Mapping[str, Any]) -> RequestError | None:
        """Return the error of a body's first object that it may not name; None without one.

        Addresses that are not valid are left to the engine.
        """
        prefix = media_prefix(self.tenant)
        for place, url in fetched_urls(body).items():
            if not is_object(url):
                continue
            try:
                bucket, key = parse_object_url(url)
            except ValueError:
                continue
            if bucket != self.bucket or not key.startswith(prefix):
                where = f"is in bucket {bucket}" if bucket != self.bucket else "has another prefix"
                return RequestError(
                    f"`{place}` {where}: a batch may only read s3://{self.bucket}/{prefix} here.",
                    param=place,
                    code=FETCH_FAILED,
                )
        return None


def may_name_object(data: bytes) -> bool:
    """Say whether the bytes of a line may name an object in S3."""
    if b"3:/" in data or b"3:\\/" in data:
        return True
    return b"\\u00" in data and _SIGN.search(data) is not None
