"""Signals during a command: they raise an exception or call a handler."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack

import pytest

from tidemill.offline.console.errors import Stopped
from tidemill.offline.console.signals import StopSignals


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    """A run in the background of a script does not end with the script's Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            assert signals.received is None
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_raises_unless_it_has_a_handler() -> None:
    """Without the handler it interrupts the command; the old handlers are restored at the end."""
    before = signal.getsignal(signal.SIGTERM)
    calls = []
    with StopSignals() as signals:
        with signals.on_signal(lambda: calls.append(1)):
            os.kill(os.getpid(), signal.SIGTERM)
        assert (calls, signals.received) == ([1], signal.SIGTERM)
    with pytest.raises(Stopped), StopSignals():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_is_answered_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    """The answer is printed before the cleanup, which may take a while."""
    messages: list[str] = []
    with StopSignals("all is down", answer="stopping"), ExitStack() as taken_down:
        taken_down.callback(lambda: messages.append(capfd.readouterr().err))
        with pytest.raises(Stopped, match="all is down"):
            os.kill(os.getpid(), signal.SIGTERM)
    assert messages == ["tidemill: stopping\n"]
