"""Freed memory is returned to the system: after a pause, or at the latest after a while."""

from __future__ import annotations

import ctypes
import os
import subprocess
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


FAULTS = """
import ctypes, resource, sys
from tidemill.engine.heap_trim import keep_heap
c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
if sys.argv[1] == "keep":
    keep_heap()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    before = faults()
    pointers = [c.malloc(6 << 20) for _ in range(8)]
    for pointer in pointers:
        ctypes.memset(pointer, 1, 6 << 20)
    for pointer in pointers:
        c.free(pointer)
print(faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's mallopt")
def test_the_tensors_of_a_step_touch_no_fresh_memory_in_the_next_one() -> None:
    """Memory that a step has freed is used again; glibc's defaults return most of it."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("GLIBC_", "MALLOC_"))
    }

    def faults(way: str) -> int:
        command = [sys.executable, "-c", FAULTS, way]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        return int(done.stdout)

    num_pages = (48 << 20) // 4096
    assert faults("default") > num_pages // 2
    assert faults("keep") < num_pages // 20
