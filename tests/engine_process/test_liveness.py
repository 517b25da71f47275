"""Signs of life: one process reads them while another's thread writes, even if its loop blocks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from tidemill.engine_process import liveness as module
from tidemill.engine_process.liveness import (
    LivenessCounts,
    LivenessPage,
    LivenessWriter,
)
from tidemill.protocol.contract import EngineError, EngineStats


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beat with almost no pause."""
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.005)


def read_until(page: LivenessPage, condition: Callable[[LivenessCounts], bool]) -> LivenessCounts:
    """Return the page once a condition holds."""
    ends = time.monotonic() + 120
    while not condition(life := page.read()):
        assert time.monotonic() < ends
        time.sleep(0.001)
    return life


def test_a_page_outlives_its_descriptor_and_is_the_same_on_both_sides() -> None:
    """It starts with zeros."""
    fd = LivenessPage.new_fd()
    one, other = LivenessPage(fd), LivenessPage(fd)
    os.close(fd)
    assert other.read() == LivenessCounts()
    one.write(LivenessCounts(1, 2, 3, 2**40))
    assert other.read() == LivenessCounts(1, 2, 3, 2**40)


def test_the_heartbeat_continues_while_the_loop_blocks() -> None:
    """It includes the engine's steps once there is an engine, and stops when the engine is gone."""
    page, is_gone = LivenessPage(LivenessPage.new_fd()), False

    def stats() -> EngineStats:
        if is_gone:
            raise EngineError("gone")
        return EngineStats(steps=7, layers=70)

    heartbeat = LivenessWriter(page)
    heartbeat.turns = 5
    others = set(threading.enumerate())
    heartbeat.start()
    [thread] = set(threading.enumerate()) - others
    assert read_until(page, lambda life: life.beats > 1)[1:] == (5, 0, 0)
    heartbeat.follow(stats)
    assert read_until(page, lambda life: life.steps > 0)[1:] == (5, 7, 70)
    is_gone = True
    thread.join(120)
    assert not thread.is_alive()
