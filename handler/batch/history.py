"""The history of a batch: what it gained by time, in shorter stretches while it is young."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from handler.batch.model import Batch

YOUNG_SECONDS: Final = 6 * 3600
_FINE_SECONDS, _COARSE_SECONDS = 60, 900


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows that became durable from `start` (Unix seconds) on; `tokens` are generated ones."""

    start: int
    seconds: int
    completed: int = 0
    failed: int = 0
    tokens: int = 0
    input_tokens: int = 0
    audio_seconds: float = 0.0


def bucket_of(batch: Batch, now: float) -> tuple[int, int]:
    """Return the start and the seconds of the bucket in which something happens now."""
    is_young = now < (batch.in_progress_at or batch.created_at) + YOUNG_SECONDS
    seconds = _FINE_SECONDS if is_young else _COARSE_SECONDS
    return int(now) // seconds * seconds, seconds
