"""Order of creation of batches and files, many of which share a second of `created_at`."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .model import Batch
    from .stored_file import File

_lock = threading.Lock()
_last_ns = 0


def creation_ns() -> int:
    """Return the Unix time in nanoseconds, later than any other that this process has returned."""
    global _last_ns  # noqa: PLW0603 - the clock of a process
    with _lock:
        _last_ns = max(time.time_ns(), _last_ns + 1)
        return _last_ns


def creation_key(item: Batch | File) -> str:
    """Return a text that sorts by creation: by `created_at`, then by nanoseconds within the second.

    Items of earlier versions have no nanoseconds: they sort first in their second, by ID.
    """
    if item.created_ns is None:
        return f"{item.created_at:012}#{item.id}"
    since = max(0, item.created_ns - item.created_at * 10**9)
    return f"{item.created_at:012}.{since:018}#{item.id}"
