"""Throughput that a worker reports."""

from __future__ import annotations

from tidemill.batch.fleet import WorkerRate
from tidemill.batch.progress_counts import Progress
from tidemill.handler.worker.context.rate_meter import REPORT_SECONDS, RateMeter

DONE = Progress(completed=90, failed=10, prompt_tokens=500, completion_tokens=100)


def test_the_first_rows_are_reported_at_once_and_then_each_minute() -> None:
    """A circuit breaker checks for durable rows: without rows nothing is reported."""
    rate_meter = RateMeter()
    assert not rate_meter.is_due(0)
    rate_meter.add(Progress())
    assert not rate_meter.is_due(0)
    rate_meter.add(DONE)
    assert rate_meter.is_due(0)
    assert rate_meter.collect(0, 5_000.7) == WorkerRate(5_000)
    assert not rate_meter.is_due(REPORT_SECONDS)
    rate_meter.add(DONE)
    assert not rate_meter.is_due(REPORT_SECONDS - 1)
    assert rate_meter.is_due(REPORT_SECONDS)


def test_rates_are_of_time_at_full_load() -> None:
    """The rates of a mostly idle minute would be wrong, and are not reported."""
    rate_meter = RateMeter()
    rate_meter.add_busy(60, is_full=True)
    rate_meter.add(DONE)
    assert rate_meter.collect(0, 1) == WorkerRate(1, 1.666667, 10.0)
    rate_meter = RateMeter()
    rate_meter.add_busy(31, is_full=False)
    rate_meter.add_busy(29, is_full=True)
    rate_meter.add(DONE)
    assert rate_meter.collect(0, 1) == WorkerRate(1)
    # They do not count later either.
    rate_meter.add_busy(50, is_full=True)
    rate_meter.add(DONE)
    assert rate_meter.collect(60, 61) == WorkerRate(61, 2.0, 12.0)


def test_what_is_too_little_to_tell_is_kept() -> None:
    """The first row of a shard comes after seconds; its rate is reported with the next ones."""
    rate_meter = RateMeter()
    rate_meter.add_busy(20, is_full=True)
    rate_meter.add(DONE)
    assert rate_meter.collect(0, 1) == WorkerRate(1)
    rate_meter.add_busy(30, is_full=True)
    rate_meter.add(DONE)
    assert rate_meter.collect(60, 61) == WorkerRate(61, 4.0, 24.0)


def test_older_minutes_count_for_less_and_less() -> None:
    """A worker whose lines become longer is soon known to be slower."""
    rate_meter = RateMeter()
    rates = []
    for rows in (600, 600, 60, 60, 60, 60):
        rate_meter.add_busy(60, is_full=True)
        rate_meter.add(Progress(completed=rows))
        rates.append(rate_meter.collect(0, 1).rows_per_second)
    assert rates[:2] == [10.0, 10.0]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] < 2
