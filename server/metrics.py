"""Prometheus metrics: request counts and latencies, engine counters and loop lag."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tidemill.protocol.contract import EngineStats, Served

from .admission import AdmissionControl
from .loop_lag import LoopLag

if TYPE_CHECKING:
    from prometheus_client import Metric

# Nothing uses the `_created` series, which would double the output.
disable_created_metrics()  # type: ignore[no-untyped-call]

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_BETWEEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class ServerMetrics:
    """Metrics of one server, scraped at `/metrics`."""

    def __init__(self, engine: Served, admission: AdmissionControl) -> None:
        self._registry = CollectorRegistry()
        self.loop_lag = LoopLag()
        self._registry.register(_CurrentValues(engine, admission, self.loop_lag))
        self.requests = Counter(
            "tidemill_requests",
            "Answered requests, by route and status.",
            ["route", "status"],
            registry=self._registry,
        )
        self.seconds = Histogram(
            "tidemill_request_seconds",
            "Time from a request's headers to the end of its response.",
            ["route"],
            registry=self._registry,
            buckets=_SECONDS,
        )
        self.first_chunk = Histogram(
            "tidemill_time_to_first_token_seconds",
            "Time from a request's headers to the first chunk of its stream.",
            registry=self._registry,
            buckets=_SECONDS,
        )
        self.between_chunks = Histogram(
            "tidemill_inter_token_seconds",
            "Time between two chunks of a stream.",
            registry=self._registry,
            buckets=_BETWEEN_SECONDS,
        )

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _CurrentValues:
    """Collector of current values of the engine, admission control and the event loop."""

    def __init__(self, engine: Served, admission: AdmissionControl, loop_lag: LoopLag) -> None:
        self._engine = engine
        self._admission = admission
        self._loop_lag = loop_lag

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: the names are known only with their values."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield every metric at its current value."""
        admission = self._admission
        yield GaugeMetricFamily(
            "tidemill_requests_inside", "Running and waiting requests.", admission.num_in_flight
        )
        yield CounterMetricFamily(
            "tidemill_requests_turned_away",
            "Requests rejected because the queue was full.",
            admission.num_refused,
        )
        yield from self._loop_lag.collect()
        yield from engine_metrics(self._engine.stats())


def engine_metrics(stats: EngineStats) -> Iterator[Metric]:
    """Yield the counters and gauges of an engine."""
    for name, words, value in (
        ("prompt_tokens", "Prompt tokens, including cached ones.", stats.prompt_tokens),
        ("cached_tokens", "Prompt tokens found in the KV cache.", stats.cached_tokens),
        ("output_tokens", "Generated tokens.", stats.output_tokens),
        ("preemptions", "Sequences preempted for lack of KV pages.", stats.preemptions),
    ):
        yield CounterMetricFamily(f"tidemill_{name}", words, value)
    for name, words, share in (
        ("running_sequences", "Running sequences.", float(stats.running)),
        ("waiting_sequences", "Waiting sequences.", float(stats.waiting)),
        ("kv_cache_usage_ratio", "KV cache usage, from 0 to 1.", stats.kv_cache_usage),
    ):
        yield GaugeMetricFamily(f"tidemill_{name}", words, share)
    yield engine_seconds(stats)


def engine_seconds(stats: EngineStats) -> Metric:
    """Return the counter of an engine's seconds by cause."""
    seconds = CounterMetricFamily(
        "tidemill_engine_seconds",
        "Time of the engine's thread by cause, and of tokenizing and detokenizing.",
        labels=["cause"],
    )
    causes = stats.step_seconds_by_cause | stats.request_seconds_by_cause
    for cause, value in causes.items():
        seconds.add_metric([cause], value)
    return seconds
