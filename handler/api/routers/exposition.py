"""A tenant's metrics in Prometheus's text format; imported only for a scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ...queries.stats import StatsObject, StatsTotals

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


class _Stats:
    """Collector that the registry calls for metrics."""

    def __init__(self, stats: StatsObject) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """Yield every metric: gauges of active batches, counters of ended ones."""
        active, ended = self._stats.active, self._stats.ended
        yield _gauges("active_batches", "Batches that have not ended.", "status", active.batches)
        for name, words, value in (
            ("waiting_rows", "Lines of running batches without a row.", active.rows_waiting),
            ("waiting_shards", "Shards that wait for a worker.", active.shards_waiting),
            ("running_shards", "Shards that a worker runs.", active.shards_running),
            ("rows_per_second", "Rows per second over the last minute.", active.rows_per_second),
            ("tokens_per_second", "Generated tokens per second.", active.tokens_per_second),
            ("input_tokens_per_second", "Input tokens per second.", active.input_tokens_per_second),
            ("audio_per_second", "Seconds of audio per second.", active.audio_seconds_per_second),
            ("active_audio_seconds", "Audio of active batches.", active.audio_seconds),
            ("active_gpu_seconds", "GPU time of active batches.", active.gpu_seconds),
        ):
            yield GaugeMetricFamily(f"tidemill_{name}", words, value)
        yield _gauges("active_rows", "Rows of active batches.", "outcome", _rows(active))
        yield _gauges("active_tokens", "Tokens of active batches.", "kind", _tokens(active))
        if active.cost is not None:
            yield GaugeMetricFamily("tidemill_active_cost", "Cost of active batches.", active.cost)
        yield _counters("ended_batches", "Batches that have ended.", "status", ended.batches)
        yield _counters("ended_rows", "Rows of ended batches.", "outcome", _rows(ended))
        yield _counters("ended_tokens", "Tokens of ended batches.", "kind", _tokens(ended))
        yield CounterMetricFamily(
            "tidemill_ended_audio_seconds", "Audio of ended batches.", ended.audio_seconds
        )
        yield CounterMetricFamily(
            "tidemill_ended_gpu_seconds", "GPU time of ended batches.", ended.gpu_seconds
        )
        if ended.cost is not None:
            yield CounterMetricFamily("tidemill_ended_cost", "Cost of ended batches.", ended.cost)


def expose(stats: StatsObject) -> str:
    """Return the text of a scrape."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Stats(stats))
    return generate_latest(registry).decode()


def _rows(done: StatsTotals) -> dict[str, int]:
    return {
        "completed": done.rows_completed,
        "failed": done.rows_failed,
        "reused": done.rows_reused,
        "truncated": done.rows_truncated,
    }


def _tokens(done: StatsTotals) -> dict[str, int]:
    return {
        "prompt": done.prompt_tokens,
        "cached": done.cached_tokens,
        "completion": done.completion_tokens,
    }


def _gauges(name: str, words: str, label: str, values: Mapping[str, int]) -> Metric:
    metric = GaugeMetricFamily(f"tidemill_{name}", words, labels=[label])
    for value, number in values.items():
        metric.add_metric([value], number)
    return metric


def _counters(name: str, words: str, label: str, values: Mapping[str, int]) -> Metric:
    metric = CounterMetricFamily(f"tidemill_{name}", words, labels=[label])
    for value, number in values.items():
        metric.add_metric([value], number)
    return metric
