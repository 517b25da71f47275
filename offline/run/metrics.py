"""Prometheus metrics of a run, served at /metrics during the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tidemill.protocol.contract import EngineError, EngineInfo, Served
from tidemill.server.loop_lag import LoopLag

from ..console.errors import Refused
from ..console.terminal import log
from .replicas import EngineReplicas
from .tally import Tally

if TYPE_CHECKING:
    from prometheus_client import Metric

    from ..files.row_writer import ResumableWriter


@dataclass(slots=True, eq=False)
class RunMetrics:
    """Metrics collector: counts of the run, and the engine's stats once it is loaded."""

    tally: Tally
    served: Served | EngineReplicas | None = None
    writer: ResumableWriter | None = None
    loop_lag: LoopLag = field(default_factory=LoopLag)

    @property
    def info(self) -> EngineInfo | None:
        """Return the engine's information; None if it was not needed, or has failed."""
        with suppress(EngineError):
            return None if self.served is None else self.served.info()
        return None

    def collect(self) -> Iterator[Metric]:
        """Yield every metric at its current value."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        tally = self.tally
        rows = CounterMetricFamily(
            "tidemill_rows", "Lines that have their row, by outcome.", labels=["outcome"]
        )
        rows.add_metric(["ok"], tally.rows_done - tally.rows_failed)
        rows.add_metric(["failed"], tally.rows_failed)
        yield rows
        yield CounterMetricFamily(
            "tidemill_truncated_rows",
            "Rows in the output whose answer was cut off at its token limit.",
            0 if self.writer is None else self.writer.num_truncated,
        )
        yield GaugeMetricFamily(
            "tidemill_input_rows", "Lines of the input that get a row.", tally.num_rows
        )
        if self.served is not None:
            yield from self.loop_lag.collect()
        for name, words, value in self._counters():
            yield CounterMetricFamily(f"tidemill_{name}", words, value)
        if self.served is not None:
            from tidemill.server.metrics import engine_seconds

            yield engine_seconds(self.served.stats())
        for name, words, share in self._gauges():
            yield GaugeMetricFamily(f"tidemill_{name}", words, share)

    def _counters(self) -> list[tuple[str, str, float]]:
        if self.served is None:
            return []
        stats = self.served.stats()
        return [
            ("audio_seconds", "Audio of answered requests.", self.tally.usage.audio_seconds),
            ("prompt_tokens", "Prompt tokens, including cached ones.", stats.prompt_tokens),
            ("cached_tokens", "Prompt tokens found in the KV cache.", stats.cached_tokens),
            ("output_tokens", "Generated tokens.", stats.output_tokens),
            ("spec_decode_draft_tokens", "Drafted tokens.", stats.draft_tokens),
            (
                "spec_decode_accepted_tokens",
                "Drafted tokens that were accepted.",
                stats.accepted_tokens,
            ),
            ("preemptions", "Sequences preempted for lack of KV pages.", stats.preemptions),
        ]

    def _gauges(self) -> list[tuple[str, str, float]]:
        if self.served is None:
            return []
        stats = self.served.stats()
        return [
            ("running_sequences", "Running sequences.", stats.running),
            ("waiting_sequences", "Waiting sequences.", stats.waiting),
            ("kv_cache_usage_ratio", "Fraction of KV pages in use, 0 to 1.", stats.kv_cache_usage),
        ]


@contextmanager
def serve_metrics(metrics: RunMetrics, host: str, port: int) -> Iterator[int]:
    """Serve `metrics` over HTTP and yield the port; raises Refused if it is in use."""
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as exc:
        words = exc.strerror or str(exc)
        raise Refused(f"metrics cannot be served on {host} port {port}: {words}") from exc
    bound = int(server.server_port)
    log(f"metrics are at http://{host}:{bound}/metrics")
    try:
        yield bound
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
