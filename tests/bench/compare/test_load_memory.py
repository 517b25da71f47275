"""Memory for loading."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from bench.compare.load_memory import Peak, peak_of

MEGABYTES = 64


def held(megabytes: int) -> Callable[[], object]:
    """Return a loader that allocates this much memory, frees it, and keeps a little."""

    def load() -> object:
        passing = bytearray(b"x") * (megabytes << 20)
        return passing[:1]

    return load


def peaks() -> tuple[Peak, Peak]:
    """Return the peaks of a large load and then of a small one."""
    return peak_of(held(MEGABYTES)), peak_of(held(1))


def test_returned_memory_counts_towards_the_peak() -> None:
    """The peak is the most resident memory of this load, not of its end or an earlier one."""
    # A new process is used, because memory of earlier tests may be released at any moment.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        first, second = pool.submit(peaks).result()
    # Half is enough, because the system may reclaim other pages of the process.
    assert first.most_bytes - first.before_bytes > (MEGABYTES // 2) << 20
    assert second.most_bytes - second.before_bytes < (MEGABYTES // 2) << 20
