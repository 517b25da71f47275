"""Spans of a run, where an endpoint for them is named."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.net.collector import collecting
from tests.offline.given import line, rows
from tidemill.net import otlp_tracing

Write = Callable[..., Path]
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
SECRET = {"messages": [{"role": "user", "content": "my secret"}]}


def test_a_run_has_a_span_and_requests_below_it(
    run: Any, write_input: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few successes and failures of many, in one trace, without their words."""
    lines = [line(str(n), **SECRET) for n in range(50)]
    source = write_input(*lines, line("bad", status=404, **SECRET))
    with collecting() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)
        assert run("-i", source, "-o", tmp_path / "rows.jsonl", "--temperature", "0") == 0
    [root] = collector.named("run")
    assert (root["tidemill.rows"], root["tidemill.rows.failed"]) == (51, 1)
    assert root["gen_ai.usage.output_tokens"] == 150
    requests = collector.named("chat")
    assert 2 <= len(requests) <= 20
    assert {(each["trace"], each["parent"]) for each in requests} == {(root["trace"], root["id"])}
    [failed] = [each for each in requests if each["is_error"]]
    assert (failed["error.type"], failed["tidemill.line"]) == ("c", 51)
    assert {each["gen_ai.request.temperature"] for each in requests} == {0}
    assert not any(b"secret" in body for body in collector.bodies)


def test_messages_are_sent_on_request(
    run: Any, write_input: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenTelemetry's own variable enables them."""
    with collecting() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)
        monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", "true")
        assert run("-i", write_input(line("a", **SECRET)), "-o", tmp_path / "rows.jsonl") == 0
    [request] = collector.named("chat")
    assert "my secret" in request["gen_ai.input.messages"]


def test_a_failed_run_is_marked(
    run: Any, write_input: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The span contains the name of the error."""
    from tidemill.offline.console.errors import EngineLost

    with collecting() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)
        with pytest.raises(EngineLost):
            run("-i", write_input(line("a", die="gone")), "-o", tmp_path / "rows.jsonl")
    [root] = collector.named("run")
    assert (root["is_error"], root["error.type"]) == (True, "EngineLost")


def test_a_collector_that_hangs_breaks_nothing(
    run: Any,
    write_input: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The rows are there, a note says that spans are not, and the end waits for a moment."""
    monkeypatch.setattr(otlp_tracing, "CLOSE_SECONDS", 0.2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")  # then its thread ends
    source = write_input(*(line(str(n)) for n in range(20)))
    with collecting(hangs=True) as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)
        started = time.monotonic()
        assert run("-i", source, "-o", tmp_path / "rows.jsonl") == 0
        assert time.monotonic() - started < 5
    assert len(rows(tmp_path / "rows.jsonl")) == 20
    assert capsys.readouterr().err.count("note: spans cannot be sent") == 1


def test_a_missing_package_is_a_note(
    run: Any,
    write_input: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The endpoint may be meant for other programs."""
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    monkeypatch.delitem(sys.modules, "tidemill.net.otlp_tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert run("-i", write_input(line("a")), "-o", tmp_path / "rows.jsonl") == 0
    assert "note: OTEL_EXPORTER_OTLP_ENDPOINT is set, but" in capsys.readouterr().err
