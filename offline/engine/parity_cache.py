"""Parity results of this machine's engine, for workers that share them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tidemill.engine.storage.disk_cache import CacheEntry, recent_entries

_KIND = "proof"


@dataclass(frozen=True, slots=True)
class ParityCache:
    """The engine's disk cache of parity results; `since` is the worker's start time."""

    since: float

    def used(self) -> Iterable[str]:
        """Return the digests of the results that were created or used since then."""
        return [entry.digest for entry in recent_entries(_KIND, self.since)]

    def load(self, digest: str) -> bytes | None:
        """Return a result with its checksum; None if it is missing or damaged."""
        return CacheEntry(_KIND, digest).load_sealed()

    def save(self, digest: str, data: bytes) -> bool:
        """Save a result with its checksum; return False if the checksum does not match."""
        return CacheEntry(_KIND, digest).save_sealed(data)
