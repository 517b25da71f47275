"""Freed memory is returned to the system: after a pause, or at the latest after a while."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from threading import Event, Thread

import pytest

from tidemill.engine.heap_trim import HeapTrimmer, trim_heap

SECONDS = 120


def test_memory_freed_together_is_returned_once() -> None:
    """Memory that is freed later is returned later."""
    count, trimmed = 0, Event()

    def trim() -> None:
        nonlocal count
        count += 1
        trimmed.set()

    trimmer = HeapTrimmer(trim, pause_seconds=0.05)
    for _ in range(100):
        trimmer.schedule()
    assert trimmed.wait(SECONDS)
    assert count == 1
    trimmed.clear()
    trimmer.schedule()
    assert trimmed.wait(SECONDS)
    assert count == 2


def test_memory_is_returned_even_without_a_pause() -> None:
    """Otherwise it would grow for as long as large requests arrive."""
    trimmed = Event()
    trimmer = HeapTrimmer(trimmed.set, pause_seconds=SECONDS, max_seconds=0.02)
    trimmer.schedule()
    while not trimmed.wait(0.001):
        trimmer.schedule()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator alone keeps arenas")
def test_memory_freed_by_a_thread_is_returned() -> None:
    """All of it is returned except the block at the end."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096

    def work() -> None:
        blocks = [libc.malloc(64_000) for _ in range(1_000)]
        for block in blocks:
            ctypes.memset(block, 1, 64_000)
        for block in blocks[:-1]:
            libc.free(block)

    thread = Thread(target=work)
    thread.start()
    thread.join()
    before = resident()
    trim_heap()
    assert resident() < before - 50_000_000
