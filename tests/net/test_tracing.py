"""Spans that are sent to a collector, or cannot be."""

from __future__ import annotations

import logging
import socket
import time

import pytest

from tests.net.collector import collecting
from tidemill.net import open_tracing, otlp_tracing
from tidemill.net.open_tracing import is_requested
from tidemill.net.tracing import Sample, Tracing

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.fixture
def warned() -> list[str]:
    """Return all warnings."""
    return []


def opened(
    monkeypatch: pytest.MonkeyPatch, url: str, warned: list[str], **more: str
) -> Tracing | None:
    """Open tracing to the collector."""
    for name, value in {ENDPOINT: url, **more}.items():
        monkeypatch.setenv(name, value)
    return open_tracing.open_tracing(warned.append)


def unused_url() -> str:
    """Return a URL where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({ENDPOINT: ""}, False),
        ({ENDPOINT: "http://x"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x/v1/traces"}, True),
        ({ENDPOINT: "http://x", "OTEL_SDK_DISABLED": "TRUE"}, False),
        ({ENDPOINT: "http://x", "OTEL_TRACES_EXPORTER": "none"}, False),
        ({ENDPOINT: "http://x", "OTEL_TRACES_SAMPLER": "parentbased_always_off"}, False),
    ],
)
def test_only_an_endpoint_requests_spans(environment: dict[str, str], *, expected: bool) -> None:
    """OpenTelemetry's own switches turn them off."""
    assert is_requested(environment) is expected


def test_spans_of_one_trace_join_across_processes(
    monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    """The root may be added last, and by another process."""
    with collecting() as collector:
        for number in range(2):
            tracing = opened(monkeypatch, collector.url, warned)
            assert tracing is not None
            tracing.start("shard", {"n": number}, trace="batch_1").end({})
            if number:
                tracing.add_root("batch_1", "batch", time.time_ns() - 10**9, {})
                tracing.start("shard", {}, trace="batch_2").end({})
            tracing.close()
    [root] = collector.named("batch")
    shards = collector.named("shard")
    assert [shard["parent"] == root["id"] for shard in shards] == [True, True, False]
    assert [shard["trace"] == root["trace"] for shard in shards] == [True, True, False]
    assert root["parent"] == ""
    assert root["seconds"] == pytest.approx(1, abs=0.5)
    assert len({span["id"] for span in collector.spans}) == 4
    assert collector.resource["service.name"] == "tidemill"
    assert warned == []


def test_the_environment_names_the_service(
    monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    """The name comes from OpenTelemetry's variables, as in any other program."""
    with collecting() as collector:
        tracing = opened(monkeypatch, collector.url, warned, OTEL_SERVICE_NAME="mine")
        assert tracing is not None
        tracing.start("run", {}).end({}, "KeyError")
        tracing.close()
    assert collector.resource["service.name"] == "mine"
    [span] = collector.spans
    assert (span["is_error"], span["error.type"], span["words"]) == (True, "KeyError", "")


@pytest.mark.parametrize("hangs", [True, False])
def test_an_unreachable_collector_causes_one_warning(
    monkeypatch: pytest.MonkeyPatch,
    warned: list[str],
    caplog: pytest.LogCaptureFixture,
    *,
    hangs: bool,
) -> None:
    """Starting and ending spans never waits for it, and closing waits only briefly."""
    monkeypatch.setattr(otlp_tracing, "CLOSE_SECONDS", 0.3)
    with collecting(hangs=True) as collector, caplog.at_level(logging.WARNING):
        url = collector.url if hangs else unused_url()
        tracing = opened(
            monkeypatch,
            url,
            warned,
            OTEL_EXPORTER_OTLP_TIMEOUT="0.2",
            OTEL_BSP_SCHEDULE_DELAY="10",
        )
        assert tracing is not None
        span = tracing.start("run", {})
        started = time.monotonic()
        for _ in range(20):
            for _ in range(20):
                span.add_request("chat", 1, {}, None)
            time.sleep(0.01)
        span.end({})
        assert time.monotonic() - started < 3
        deadline = time.monotonic() + 120
        while not warned:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        started = time.monotonic()
        tracing.close()
        assert time.monotonic() - started < 2
    assert warned == ["spans cannot be sent to the OTLP endpoint: some are lost"]
    assert caplog.records == []


def test_a_failed_send_at_close_is_reported(
    monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    """A run may end before the exporter notices that the collector hangs."""
    monkeypatch.setattr(otlp_tracing, "CLOSE_SECONDS", 0.2)
    with collecting(hangs=True) as collector:
        tracing = opened(monkeypatch, collector.url, warned)
        assert tracing is not None
        tracing.start("run", {}).end({})
        tracing.close()
        assert len(warned) == 1
        # Its thread would keep retrying for some seconds, during the tests that follow.
        tracing._exporter.shutdown()


def test_an_invalid_variable_causes_a_warning(
    monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    """Work continues without spans."""

    def refuse() -> None:
        raise ValueError("no such compression")

    monkeypatch.setattr(otlp_tracing, "OTLPSpanExporter", refuse)
    assert opened(monkeypatch, "http://127.0.0.1:9", warned) is None
    assert "no spans are sent: no such compression" in warned[0]


def test_an_invalid_share_samples_everything(
    monkeypatch: pytest.MonkeyPatch, warned: list[str]
) -> None:
    """Some samplers have other kinds of arguments."""
    for given, taken in (("much", True), ("nan", True), ("7", True), ("-1", False), ("0", False)):
        with collecting() as collector:
            more = {"OTEL_TRACES_SAMPLER_ARG": given}
            tracing = opened(monkeypatch, collector.url, warned, **more)
            assert tracing is not None
            assert tracing.start("run", {}).takes(is_success=True) is taken
            tracing.close()


def test_a_sample_is_a_share_of_requests() -> None:
    """The sampled requests are evenly spread, starting with the first one."""
    sample = Sample(0.25, 1000.0)
    assert [sample.takes(is_success=True) for _ in range(8)] == [True, False, False, False] * 2
    assert not any(Sample(0.0).takes(is_success=True) for _ in range(9))


def test_a_sample_is_limited_per_second() -> None:
    """Failures have a separate limit."""
    now = 0.0
    sample = Sample(clock=lambda: now)
    taken = [sample.takes(is_success=True) for _ in range(1_000)]
    assert sum(taken) == 5
    assert sample.takes(is_success=False)
    now = 0.5
    assert sum(sample.takes(is_success=True) for _ in range(1_000)) == 2
    now = 1e6
    assert sum(sample.takes(is_success=True) for _ in range(1_000)) == 5
