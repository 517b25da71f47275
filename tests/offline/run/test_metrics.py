"""/metrics while a run goes on."""

from __future__ import annotations

import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.offline.given import line
from tidemill.offline.console.errors import Refused

Write = Callable[..., Path]
LAG = "tidemill_loop_lag_seconds_count"


def scrape(url: str) -> dict[str, float]:
    """Return each sample at the address, except histogram buckets."""
    with urllib.request.urlopen(url, timeout=60) as response:  # noqa: S310 - our own loopback
        text = response.read().decode()
    samples = (row.rsplit(" ", 1) for row in text.splitlines() if not row.startswith("#"))
    parts = (f"{LAG.removesuffix('count')}bucket", f"{LAG.removesuffix('count')}sum")
    return {name: float(value) for name, value in samples if not name.startswith(parts)}


def wait_for_log(process: Any, pattern: str) -> str:
    """Return the match of the pattern's group in the stderr of a process."""
    for words in process.stderr:
        if match := re.search(pattern, words):
            return match[1]
    raise AssertionError(f"it never printed {pattern}")


def test_metrics_are_served_while_the_job_runs(
    spawn: Callable[..., Any], write_input: Write, tmp_path: Path
) -> None:
    """Rows by outcome, tokens and the engine's state are served at the printed port."""
    source = write_input(line("a"), line("b", status=400), line("c"), line("d", wait=60))
    process = spawn("-i", source, "-o", tmp_path / "out", "--enable-metrics", "--port", "0")
    url = wait_for_log(process, r"metrics are at (http://127\.0\.0\.1:\d+/metrics)")
    wait_for_log(process, "(model loaded)")
    deadline = time.monotonic() + 120
    while (found := scrape(url))['tidemill_rows_total{outcome="ok"}'] < 2 or not found.get(LAG):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert found.pop(LAG) > 0
    assert found.pop('tidemill_engine_seconds_total{cause="launching"}') == 3
    assert not sum(found.pop(name) for name in [*found] if "engine_seconds" in name)
    assert found == {
        'tidemill_rows_total{outcome="ok"}': 2,
        'tidemill_rows_total{outcome="failed"}': 1,
        "tidemill_truncated_rows_total": 0,
        "tidemill_input_rows": 4,
        "tidemill_audio_seconds_total": 0,
        "tidemill_prompt_tokens_total": 100,
        "tidemill_cached_tokens_total": 40,
        "tidemill_output_tokens_total": 30,
        "tidemill_spec_decode_draft_tokens_total": 0,
        "tidemill_spec_decode_accepted_tokens_total": 0,
        "tidemill_preemptions_total": 1,
        "tidemill_running_sequences": 3,
        "tidemill_waiting_sequences": 2,
        "tidemill_kv_cache_usage_ratio": 0.5,
    }


def test_metrics_are_there_before_the_model_is(
    spawn: Callable[..., Any], write_input: Write, tmp_path: Path
) -> None:
    """During loading there are metrics of rows, but none of an engine."""
    flags = ["--enable-metrics", "--port", "0"]
    source = write_input(line("a"))
    slow = ["--load-seconds", "60"]
    process = spawn("-i", source, "-o", tmp_path / "out", *flags, options=slow)
    url = wait_for_log(process, r"metrics are at (\S+)")
    wait_for_log(process, "(loading m)")
    assert scrape(url) == {
        'tidemill_rows_total{outcome="ok"}': 0,
        'tidemill_rows_total{outcome="failed"}': 0,
        "tidemill_truncated_rows_total": 0,
        "tidemill_input_rows": 1,
    }


def test_metrics_end_with_the_run(
    run: Any, write_input: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The port is free again."""
    flags = ["--enable-metrics", "--port", "0"]
    assert run("-i", write_input(line("a")), "-o", tmp_path / "out", *flags) == 0
    match = re.search(r"http://\S+", capsys.readouterr().err)
    assert match is not None
    with pytest.raises(urllib.error.URLError, match="refused"):
        scrape(match[0])


def test_a_port_that_is_taken_is_refused_first(
    run: Any, write_input: Write, tmp_path: Path
) -> None:
    """Before the input is read, and without a trace."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Refused, match=f"127.0.0.1 port {port}: Address already in use"):
            run("-i", write_input("{"), "-o", tmp_path / "out", "--enable-metrics", "--port", port)
    assert not (tmp_path / "out").exists()
