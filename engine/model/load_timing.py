"""Load timing: seconds of each step of a load in this process, for the engine's start log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

# Of the last load: a serving process has one, and several threads run its steps.
_seconds: dict[str, float] = {}
_downloads: list[object] = []  # in progress


@contextmanager
def timed(step: str) -> Iterator[None]:
    """Measure the time of a step, by its name."""
    began = time.perf_counter()
    try:
        yield
    finally:
        _seconds[step] = round(time.perf_counter() - began, 3)


def step_seconds() -> dict[str, float]:
    """Return the seconds of each finished step, by name."""
    return dict(_seconds)


@contextmanager
def downloading() -> Iterator[None]:
    """Mark the time while entered as a download, which does not count towards load limits."""
    mark = object()
    _downloads.append(mark)
    try:
        yield
    finally:
        _downloads.remove(mark)


def is_downloading() -> bool:
    """Return whether a part of the model is being downloaded."""
    return bool(_downloads)
