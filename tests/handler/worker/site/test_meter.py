"""What is summed up, and when it is told."""

from __future__ import annotations

from handler.batch.model import Progress
from handler.metrics import Metric
from handler.worker.site.meter import TELL_SECONDS, Meter

DONE = Progress(3, 1, 40, 16, 12, 2.5)


def test_nothing_is_told_of_nothing() -> None:
    """An idle worker has no figures, however long it waits."""
    meter = Meter()
    meter.count(Progress())
    assert not meter.is_due(0)
    assert not meter.is_due(10 * TELL_SECONDS)
    assert meter.take() == {}


def test_a_minute_begins_with_its_first_work() -> None:
    """Not with the end of the last one: a worker that was idle for hours waits a minute, too."""
    meter = Meter()
    assert not meter.is_due(0)
    meter.work(1, 0)
    assert not meter.is_due(1_000)
    assert not meter.is_due(1_000 + TELL_SECONDS - 1)
    assert meter.is_due(1_000 + TELL_SECONDS)
    meter.take()
    assert not meter.is_due(1_000 + 2 * TELL_SECONDS)
    meter.count(DONE)
    assert not meter.is_due(5_000)
    assert meter.is_due(5_000 + TELL_SECONDS)


def test_figures_are_sums_of_all_since_the_last() -> None:
    """Taken once: the next ones begin at nothing."""
    meter = Meter()
    for _ in range(2):
        meter.count(DONE)
        meter.work(3.0, 0.25)
    meter.work(2.0, 0.125)
    assert meter.take() == {
        Metric.PROMPT_TOKENS: 80,
        Metric.CACHED_TOKENS: 32,
        Metric.COMPLETION_TOKENS: 24,
        Metric.ROWS_COMPLETED: 6,
        Metric.ROWS_FAILED: 2,
        Metric.GPU_SECONDS: 5,
        Metric.TOKENS_PER_SECOND: 3,
        Metric.KV_CACHE_USE: 25,
    }
    assert meter.take() == {}


def test_rows_without_a_time_have_no_rate() -> None:
    """As when the last ones of a minute become durable after the engine is empty."""
    meter = Meter()
    meter.count(DONE)
    assert Metric.TOKENS_PER_SECOND not in meter.take()
