"""Parity results in the bucket: a parity check of one machine saves others the same check.

The engine caches the result of a parity check under a digest of everything that it depends on:
weights, packages, engine, device. So a result is copied unchanged, and every engine finds those
that apply to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from tidemill.batch.object_keys import parity_prefix

from ..aws.bucket import Bucket
from ..aws.calls import Operation

_DIGEST: Final = re.compile("[0-9a-f]{40}")
_MAX_BYTES: Final = 4096
# Each release, kind of device and dtype has a separate result; older ones are of no use.
_MAX_RESULTS: Final = 32


class ResultCache(Protocol):
    """Cache of parity results on this machine; its errors are never raised."""

    def used(self) -> Iterable[str]:
        """Return the digests of the results that this machine's engine has produced or used."""

    def load(self, digest: str) -> bytes | None:
        """Return a result; None if there is no intact one."""

    def save(self, digest: str, data: bytes) -> bool:
        """Save a result from another machine; False if it is not intact."""


@dataclass(frozen=True, slots=True)
class ParityResults:
    """Parity results of a model, in the `cache` of this machine and in the bucket."""

    bucket: Bucket
    model: str
    cache: ResultCache
    _shared: set[str] = field(default_factory=set, init=False)

    def download(self) -> Operation[None]:
        """Copy the newest results of other machines."""
        prefix = parity_prefix(self.model)
        listed, _ = yield from self.bucket.list_page(prefix, "")
        for head in sorted(listed, key=lambda head: -head.modified)[:_MAX_RESULTS]:
            digest = head.key.removeprefix(prefix)
            if _DIGEST.fullmatch(digest) and head.num_bytes <= _MAX_BYTES:
                is_here = self.cache.load(digest) is not None
                if is_here or self.cache.save(digest, (yield from self.bucket.get(head.key))):
                    self._shared.add(digest)

    def upload(self) -> Operation[None]:
        """Copy this machine's results that the bucket lacks, or has in part."""
        for digest in set(self.cache.used()) - self._shared:
            if (data := self.cache.load(digest)) is not None:
                yield from self.bucket.put(parity_prefix(self.model) + digest, data)
                self._shared.add(digest)
