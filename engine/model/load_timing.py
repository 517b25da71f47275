"""Load timing: seconds of each step of a load in this process, for the engine's start log."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

# Of the last load: a process that serves has one, and its steps are done by several threads.
_seconds: dict[str, float] = {}
_downloads: list[object] = []  # in progress


@contextmanager
def timed(step: str) -> Iterator[None]:
    """Take the time of a step, whose name is told with it."""
    began = time.perf_counter()
    try:
        yield
    finally:
        _seconds[step] = round(time.perf_counter() - began, 3)


def step_seconds() -> dict[str, float]:
    """Return the seconds of each step that was done, by name."""
    return dict(_seconds)


@contextmanager
def downloading() -> Iterator[None]:
    """Mark the time while entered as a download, which no limit of a load counts."""
    mark = object()
    _downloads.append(mark)
    try:
        yield
    finally:
        _downloads.remove(mark)


def is_downloading() -> bool:
    """Return whether a part of the model is being downloaded."""
    return bool(_downloads)
