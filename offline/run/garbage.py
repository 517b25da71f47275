"""Garbage collection of a run: rare, because lines and rows are freed by their reference counts."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_MIN_ALLOCATIONS: Final = 20_000
"""With Python's 700 (2,000 from 3.13 on) a run would spend a twentieth of its time on them."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Raise the number of allocations between collections while entered."""
    thresholds = gc.get_threshold()
    if thresholds[0]:  # 0 disables collections
        gc.set_threshold(max(_MIN_ALLOCATIONS, thresholds[0]), *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
