"""OTLP tracing: spans of OpenTelemetry's SDK, sent by a background thread.

The tracer is private: programs that import this package keep the global one for themselves.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from .tracing import Attributes, Sample

Warn = Callable[[str], None]

CLOSE_SECONDS: Final = 2.0
_PAUSE_SECONDS: Final = 60.0
_EXPORTER_LOGGER: Final = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


def open_otlp(warn: Warn, sample: Sample, *, captures_content: bool) -> OtlpTracing:
    """Open tracing to the endpoint of the environment; raises if a variable is invalid."""
    exporter = QuietExporter(OTLPSpanExporter(), warn)
    return OtlpTracing(exporter, sample, captures_content=captures_content)


class OtlpTracing:
    """Spans of one process, sent to an exporter; see `tracing.Tracing`."""

    def __init__(
        self, exporter: SpanExporter, sample: Sample, *, captures_content: bool = False
    ) -> None:
        self.sample = sample
        self.captures_content = captures_content
        self._ids = _Ids()
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=_resource(),
            id_generator=self._ids,
            shutdown_on_exit=False,
        )
        self._exporter = exporter
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self._provider.get_tracer("tidemill")

    def start(self, name: str, attributes: Attributes, *, trace: str | None = None) -> OtlpSpan:
        """Start a span; all spans of one `trace` are children of its root."""
        context = None
        if trace is not None:
            root = SpanContext(*_ids_of(trace), is_remote=True, trace_flags=TraceFlags(1))
            context = set_span_in_context(NonRecordingSpan(root))
        return OtlpSpan(self, self.tracer.start_span(name, context, attributes=attributes))

    def add_root(self, trace: str, name: str, started_ns: int, attributes: Attributes) -> None:
        """Add the root of a `trace`, which ends now."""
        self._ids.next_root = _ids_of(trace)
        span = self.tracer.start_span(name, Context(), attributes=attributes, start_time=started_ns)
        span.end()

    def close(self) -> None:
        """Send the remaining spans, within a short timeout."""
        closing = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive() and isinstance(self._exporter, QuietExporter):
            self._exporter.give_up()


class OtlpSpan:
    """Span of a run or a shard; see `tracing.WorkSpan`."""

    def __init__(self, tracing: OtlpTracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span
        self.captures_content = tracing.captures_content

    def takes(self, *, is_success: bool) -> bool:
        """Say whether the next request is in the sample."""
        return self._tracing.sample.takes(is_success=is_success)

    def add_request(
        self, name: str, started_ns: int, attributes: Attributes, error_type: str | None
    ) -> None:
        """Add the span of a request that ends now; the model is in this process or a child."""
        span = self._tracing.tracer.start_span(
            name,
            set_span_in_context(self._span),
            kind=SpanKind.INTERNAL,
            attributes=attributes,
            start_time=started_ns,
        )
        _end(span, error_type)

    def end(self, attributes: Attributes, error_type: str | None = None) -> None:
        """End the span."""
        self._span.set_attributes(attributes)
        _end(self._span, error_type)


class QuietExporter(SpanExporter):
    """Exporter that warns once when spans cannot be sent, and then pauses for a while."""

    def __init__(
        self, exporter: SpanExporter, warn: Warn, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._exporter = exporter
        self._warn = warn
        self._clock = clock
        self._paused_until: float | None = None
        self._has_warned = False
        self._quiet = _Quiet()
        logging.getLogger(_EXPORTER_LOGGER).addFilter(self._quiet)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans; drops them during a pause."""
        if self._paused_until is not None and self._clock() < self._paused_until:
            return SpanExportResult.FAILURE
        with self._quiet:
            result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._paused_until = self._clock() + _PAUSE_SECONDS
            self.give_up()
        return result

    def shutdown(self) -> None:
        """Close the exporter."""
        with self._quiet:
            self._exporter.shutdown()
        logging.getLogger(_EXPORTER_LOGGER).removeFilter(self._quiet)

    def give_up(self) -> None:
        """Warn once that spans are lost."""
        if not self._has_warned:
            self._has_warned = True
            self._warn("spans cannot be sent to the OTLP endpoint: some are lost")


class _Quiet(logging.Filter):
    """Log filter that drops the records of threads inside it, not those of other exporters."""

    def __init__(self) -> None:
        super().__init__()
        self._threads = set[int]()

    def __enter__(self) -> None:
        self._threads.add(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        self._threads.discard(threading.get_ident())

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether to log a record."""
        return record.thread not in self._threads


class _Ids(RandomIdGenerator):
    """Span ids: random, except for the root of a trace that other processes join."""

    def __init__(self) -> None:
        self.next_root: tuple[int, int] | None = None

    def generate_trace_id(self) -> int:
        """Return the trace id of the next root; the SDK calls this before `generate_span_id`."""
        return super().generate_trace_id() if self.next_root is None else self.next_root[0]

    def generate_span_id(self) -> int:
        """Return the id of the next span."""
        root, self.next_root = self.next_root, None
        return super().generate_span_id() if root is None else root[1]


def _ids_of(trace: str) -> tuple[int, int]:
    """Return the ids of a trace and its root."""
    digest = blake2b(trace.encode(), digest_size=24).digest()
    return int.from_bytes(digest[:16]), int.from_bytes(digest[16:])


def _end(span: Span, error_type: str | None) -> None:
    """End a span without the error message, which may quote a request."""
    if error_type is not None:
        span.set_attribute("error.type", error_type)
        span.set_status(StatusCode.ERROR)
    span.end()


def _resource() -> Resource:
    """Return the resource of the spans, named by the environment or else `tidemill`."""
    named = "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    is_named = named or bool(os.environ.get("OTEL_SERVICE_NAME"))
    return Resource.create({} if is_named else {SERVICE_NAME: "tidemill"})
