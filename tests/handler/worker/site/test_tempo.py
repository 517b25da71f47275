"""How fast a worker says it goes."""

from __future__ import annotations

from handler.batch.fleet import Pace
from handler.batch.model import Progress
from handler.worker.site.tempo import TELL_SECONDS, Tempo

DONE = Progress(completed=90, failed=10, prompt_tokens=500, completion_tokens=100)


def test_the_first_rows_are_told_at_once_and_then_each_minute() -> None:
    """A brake looks whether anything has become durable: without rows nothing is told."""
    tempo = Tempo()
    assert not tempo.is_due(0)
    tempo.count(Progress())
    assert not tempo.is_due(0)
    tempo.count(DONE)
    assert tempo.is_due(0)
    assert tempo.take(0, 5_000.7) == Pace(5_000)
    assert not tempo.is_due(TELL_SECONDS)
    tempo.count(DONE)
    assert not tempo.is_due(TELL_SECONDS - 1)
    assert tempo.is_due(TELL_SECONDS)


def test_rates_are_of_time_at_full_load() -> None:
    """Those of a minute that was mostly idle would be wrong, and are not told."""
    tempo = Tempo()
    tempo.work(60, is_full=True)
    tempo.count(DONE)
    assert tempo.take(0, 1) == Pace(1, 1.666667, 10.0)
    tempo = Tempo()
    tempo.work(31, is_full=False)
    tempo.work(29, is_full=True)
    tempo.count(DONE)
    assert tempo.take(0, 1) == Pace(1)
    # They do not count later either.
    tempo.work(50, is_full=True)
    tempo.count(DONE)
    assert tempo.take(60, 61) == Pace(61, 2.0, 12.0)


def test_what_is_too_little_to_tell_is_kept() -> None:
    """The first row of a shard comes after seconds; its rate is told with those that follow."""
    tempo = Tempo()
    tempo.work(20, is_full=True)
    tempo.count(DONE)
    assert tempo.take(0, 1) == Pace(1)
    tempo.work(30, is_full=True)
    tempo.count(DONE)
    assert tempo.take(60, 61) == Pace(61, 4.0, 24.0)


def test_older_minutes_count_for_less_and_less() -> None:
    """A worker whose lines become longer is soon known to be slower."""
    tempo = Tempo()
    told = []
    for rows in (600, 600, 60, 60, 60, 60):
        tempo.work(60, is_full=True)
        tempo.count(Progress(completed=rows))
        told.append(tempo.take(0, 1).rows_per_second)
    assert told[:2] == [10.0, 10.0]
    assert told[2:] == sorted(told[2:], reverse=True)
    assert told[-1] < 2
