"""A collector of spans on the loopback interface, which may hang."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

Span = dict[str, Any]


class Collector:
    """An OTLP endpoint that records requests; `bodies` are the raw ones."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.bodies: list[bytes] = []

    @property
    def resource(self) -> dict[str, Any]:
        """Return the resource attributes of the first spans."""
        request = ExportTraceServiceRequest.FromString(self.bodies[0])
        return _attributes(request.resource_spans[0].resource)

    @property
    def spans(self) -> list[Span]:
        """Return all spans: names, IDs, times and attributes."""
        found = []
        for body in self.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    found += [_span(span) for span in scope.spans]
        return found

    def named(self, name: str) -> list[Span]:
        """Return the spans with a name."""
        return [span for span in self.spans if span["name"] == name]


@contextmanager
def collecting(*, hangs: bool = False) -> Iterator[Collector]:
    """Yield a collector, which never answers if it `hangs`."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.bodies.append(body)
            if hangs:
                ended.wait()
                return
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield collector
    finally:
        ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _span(span: Any) -> Span:
    return {
        "name": span.name,
        "trace": span.trace_id.hex(),
        "id": span.span_id.hex(),
        "parent": span.parent_span_id.hex(),
        "seconds": (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        "is_error": span.status.code == span.status.STATUS_CODE_ERROR,
        "words": span.status.message,
        **_attributes(span),
    }


def _attributes(owner: Any) -> Span:
    found: Span = {}
    for attribute in owner.attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        is_list = kind == "array_value"
        found[attribute.key] = [each.string_value for each in value.values] if is_list else value
    return found
