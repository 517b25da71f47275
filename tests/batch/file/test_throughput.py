"""Rates of a run over the last minute."""

from __future__ import annotations

import pytest

from tidemill.batch.file.throughput import (
    WINDOW_SECONDS,
    Countdown,
    Rates,
    RateWindow,
    format_rate,
    seconds_left,
)
from tidemill.protocol.contract import Usage


class Clock:
    """A clock that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def _tokens(number: int) -> Usage:
    return Usage(completion_tokens=number)


@pytest.mark.parametrize(
    ("rates", "words"),
    [
        ((512.0, 90.0, 0.0), "512 tokens/s"),
        ((0.0, 20_480.0, 0.0), "20,480 tokens in/s"),
        ((40.0, 90.0, 31.25), "31.2 s of audio/s"),
        ((0.0, 0.0, 0.0), "0 tokens/s"),
    ],
)
def test_the_main_rate_depends_on_the_work(rates: tuple[float, float, float], words: str) -> None:
    """Embeddings generate no tokens, and seconds of audio describe speech better than tokens."""
    assert format_rate(*rates) == words
    assert Rates(1.0, *rates).main_rate == words


def test_a_rate_is_over_the_time_since_the_run_began() -> None:
    """The window is shorter then; rows of the first moment do not make the rate infinite."""
    clock = Clock()
    pace = RateWindow(clock)
    assert pace.rates == Rates()
    pace.add(3, Usage(prompt_tokens=90, completion_tokens=30, audio_seconds=15.0))
    assert pace.rates == (3.0, 30.0, 90.0, 15.0)
    clock.now += 10
    assert pace.rates == (0.3, 3.0, 9.0, 1.5)
    pace.add(7, Usage(prompt_tokens=10, completion_tokens=70))
    assert pace.rates == (1.0, 10.0, 10.0, 1.5)


def test_a_rate_continues_from_another_run() -> None:
    """It includes that run's time and rows within the last minute."""
    clock = Clock()
    ended = RateWindow(clock)
    ended.add(50, _tokens(500))
    clock.now += 40
    ended.add(30, _tokens(300))
    clock.now += 10
    pace = RateWindow(clock)
    pace.add(20, _tokens(200))
    pace.merge(ended)
    assert pace.rates == Rates(2.0, 20.0)
    clock.now += 20
    assert pace.rates == Rates(0.833, 8.333)


def test_a_rate_forgets_rows_older_than_a_minute() -> None:
    """It falls to zero while no rows end."""
    clock = Clock()
    pace = RateWindow(clock)
    for _ in range(12):
        clock.now += 10
        pace.add(20, _tokens(600))
    clock.now += 5
    assert pace.rates == Rates(2.0, 60.0)
    clock.now += WINDOW_SECONDS
    assert pace.rates == Rates()


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
def test_the_end_is_estimated_after_a_share_of_rows_or_some_seconds(
    num_done: int, seconds: float, rate: float, left: float | None
) -> None:
    """For a thousand rows, any earlier number would be a guess."""
    assert seconds_left(num_done / 1_000, seconds, rate / 1_000) == left


def test_the_time_left_counts_down_until_the_next_row() -> None:
    """Without a new row there is no new estimate."""
    clock = Clock()
    countdown = Countdown(clock)
    estimates = []
    for num_rows, estimate in ((0, 1.0), (3, None), (3, 10.0), (3, 99.0), (3, 99.0), (4, 5.0)):
        estimates.append(countdown.left(num_rows, estimate))
        clock.now += 5
    assert estimates == [None, None, 10.0, 5.0, None, 5.0]
