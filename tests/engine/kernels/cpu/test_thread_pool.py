"""The kernels' thread pool: every item runs once, for any caller, without waiting for sleepers."""

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from tidemill.engine.kernels.cpu import thread_pool
from tidemill.engine.kernels.cpu.jit_cache import compiled
from tidemill.engine.kernels.cpu.thread_pool import BUSY, parallel_for, pool_size, shared_pool


@compiled
def _count(item: Any, counts: Any, work: Any) -> None:
    total = 0.0
    for i in range(work):
        total += np.sqrt(item + i)
    counts[item] += 1 + (total < 0)


@compiled
def _count_all(words: Any, counts: Any, work: Any) -> None:
    parallel_for(words, len(counts), _count, (counts, work))


@pytest.fixture(scope="module")
def words() -> thread_pool.Pool:
    """Return a team of two threads, whatever torch has."""
    return thread_pool._start_pool(1)


@pytest.mark.parametrize("work", [0, 1000])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 64, 1001])
def test_every_item_is_done_once(words: thread_pool.Pool, count: int, work: int) -> None:
    """Neither lost nor done twice, after a pause in which the others fell asleep or without one."""
    counts = np.zeros(count, np.int64)
    for _ in range(50):
        _count_all(words, counts, work)
    time.sleep(0.01)
    _count_all(words, counts, work)
    assert (counts == 51).all()


def test_another_thread_takes_part(words: thread_pool.Pool) -> None:
    """Items that wait for each other end only when two threads have one each."""
    met = np.zeros(2, np.int64)
    _meet_all(words, met)
    assert met.tolist() == [1, 1]


@compiled
def _meet(item: Any, met: Any) -> None:
    thread_pool.atomic_add(met, item, 1)
    while thread_pool._read(met, 1 - item) == 0:
        thread_pool._yield()


@compiled
def _meet_all(words: Any, met: Any) -> None:
    parallel_for(words, len(met), _meet, (met,))


def test_callers_at_once_do_not_disturb_each_other(words: thread_pool.Pool) -> None:
    """A caller that finds the pool busy runs all of its items alone."""
    results = [np.zeros(100, np.int64) for _ in range(4)]

    def call(counts: Any) -> None:
        for _ in range(200):
            _count_all(words, counts, 50)

    callers = [threading.Thread(target=call, args=(counts,)) for counts in results]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all((counts == 200).all() for counts in results)
    assert words[BUSY] == 0


def test_a_thread_pool_works_after_its_threads_are_gone() -> None:
    """A child of `fork` has the words and no threads: the caller does everything, and returns."""
    alone = np.zeros(thread_pool.NUM_WORDS, np.int64)
    counts = np.zeros(10, np.int64)
    _count_all(alone, counts, 0)
    assert (counts == 1).all()


def test_there_is_one_team_and_it_stays_as_large_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels of all models of a process share it, also when torch has one thread by then."""
    before = shared_pool(), pool_size()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert shared_pool() is before[0]
    assert pool_size() == before[1]
    assert thread_pool._start_pool(3)[thread_pool.SIZE] == 4
