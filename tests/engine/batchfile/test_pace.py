"""Rates of a run: those of the last minute."""

from __future__ import annotations

import pytest

from engine.batchfile.pace import WINDOW_SECONDS, Pace, seconds_left


class Clock:
    """A clock that is set by hand."""

    now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def test_a_rate_is_over_the_time_since_the_run_began() -> None:
    """While that is less than a minute; rows of the first moment do not make it endless."""
    clock = Clock()
    pace = Pace(clock)
    assert pace.rates == (0.0, 0.0)
    pace.add(3, 30)
    assert pace.rates == (3.0, 30.0)
    clock.now += 10
    assert pace.rates == (0.3, 3.0)
    pace.add(7, 70)
    assert pace.rates == (1.0, 10.0)


def test_a_rate_goes_on_where_another_ended() -> None:
    """With its time and with its rows, as far as they are of the last minute."""
    clock = Clock()
    ended = Pace(clock)
    ended.add(50, 500)
    clock.now += 40
    ended.add(30, 300)
    clock.now += 10
    pace = Pace(clock)
    pace.add(20, 200)
    pace.go_on_from(ended)
    assert pace.rates == (2.0, 20.0)
    clock.now += 20
    assert pace.rates == (0.833, 8.333)


def test_a_rate_forgets_what_was_a_minute_ago() -> None:
    """And falls to nothing while nothing comes."""
    clock = Clock()
    pace = Pace(clock)
    for _ in range(12):
        clock.now += 10
        pace.add(20, 600)
    clock.now += 5
    assert pace.rates == (2.0, 60.0)
    clock.now += WINDOW_SECONDS
    assert pace.rates == (0.0, 0.0)


@pytest.mark.parametrize(
    ("num_done", "seconds", "rate", "left"),
    [
        (10, 5.0, 2.0, None),
        (20, 5.0, 2.0, 490.0),
        (1, 20.0, 2.0, 499.5),
        (20, 60.0, 0.0, None),
        (1_000, 60.0, 2.0, None),
    ],
)
def test_the_end_is_told_from_a_share_of_the_rows_or_some_seconds_on(
    num_done: int, seconds: float, rate: float, left: float | None
) -> None:
    """Of a thousand rows: before, any number would be a guess."""
    assert seconds_left(num_done, 1_000, seconds, rate) == left
