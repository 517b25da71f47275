"""Amounts and durations as text."""

from __future__ import annotations

import pytest

from tidemill.offline.console.terminal import duration


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (18_720, "5 h 12 min")],
)
def test_durations_have_two_units_at_most(seconds: float, words: str) -> None:
    """A duration reads as a person would say it."""
    assert duration(seconds) == words
