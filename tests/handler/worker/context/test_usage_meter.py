"""Sums of the work done, and the times at which they are reported."""

from __future__ import annotations

from tidemill.batch.progress_counts import Progress
from tidemill.handler.observability import Metric
from tidemill.handler.worker.context.usage_meter import REPORT_SECONDS, UsageMeter

DONE = Progress(3, 1, 40, 16, 12, 2.5)


def test_an_idle_worker_reports_nothing() -> None:
    """It has no metrics, however long it waits."""
    usage_meter = UsageMeter()
    usage_meter.add(Progress())
    assert not usage_meter.is_due(0)
    assert not usage_meter.is_due(10 * REPORT_SECONDS)
    assert usage_meter.collect() == {}


def test_a_minute_begins_with_its_first_work() -> None:
    """It does not begin at the end of the last one: a worker idle for hours waits a minute, too."""
    usage_meter = UsageMeter()
    assert not usage_meter.is_due(0)
    usage_meter.add_busy(1, 0)
    assert not usage_meter.is_due(1_000)
    assert not usage_meter.is_due(1_000 + REPORT_SECONDS - 1)
    assert usage_meter.is_due(1_000 + REPORT_SECONDS)
    usage_meter.collect()
    assert not usage_meter.is_due(1_000 + 2 * REPORT_SECONDS)
    usage_meter.add(DONE)
    assert not usage_meter.is_due(5_000)
    assert usage_meter.is_due(5_000 + REPORT_SECONDS)


def test_figures_are_sums_of_all_since_the_last() -> None:
    """Taken once: the next ones begin at nothing."""
    usage_meter = UsageMeter()
    for _ in range(2):
        usage_meter.add(DONE)
        usage_meter.add_busy(3.0, 0.25)
    usage_meter.add_busy(2.0, 0.125)
    assert usage_meter.collect() == {
        Metric.PROMPT_TOKENS: 80,
        Metric.CACHED_TOKENS: 32,
        Metric.COMPLETION_TOKENS: 24,
        Metric.ROWS_COMPLETED: 6,
        Metric.ROWS_FAILED: 2,
        Metric.GPU_SECONDS: 5,
        Metric.TOKENS_PER_SECOND: 3,
        Metric.KV_CACHE_USE: 25,
    }
    assert usage_meter.collect() == {}


def test_rows_without_a_time_have_no_rate() -> None:
    """The last rows of a minute may become durable after the engine is empty."""
    usage_meter = UsageMeter()
    usage_meter.add(DONE)
    assert Metric.TOKENS_PER_SECOND not in usage_meter.collect()
