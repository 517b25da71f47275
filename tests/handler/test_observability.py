"""Figures as CloudWatch takes them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from tests.handler.emf import lines_in, parse
from tidemill.batch.progress_counts import Progress
from tidemill.handler.observability import Metric, emit, figures_of

ROOT = Path(__file__).parents[2]


class Stream:
    """A standard output that takes note of each call."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def write(self, text: str) -> None:
        """Take a text."""
        self.calls.append(text)

    def flush(self) -> None:
        """Take note that all is out."""
        self.calls.append("flushed")


class BrokenStream(Stream):
    """A standard output whose reader is gone."""

    def write(self, text: str) -> NoReturn:
        """Fail as a pipe does."""
        raise BrokenPipeError(text)


def test_a_line_makes_metrics_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Figures are metrics with their units, labels are in the line and are none."""
    emit(
        {Metric.ROWS_COMPLETED: 7, Metric.GPU_SECONDS: 1.5, Metric.TOKENS_PER_SECOND: 30.25},
        model="org/model",
        batch_id="batch_1",
    )
    [line] = lines_in(capsys.readouterr().out)
    assert line.dimensions == {"service": "worker", "model": "org/model"}
    assert line.figures == {"RowsCompleted": 7, "GpuSeconds": 1.5, "TokensPerSecond": 30.25}
    assert line.units == {
        "RowsCompleted": "Count",
        "GpuSeconds": "Seconds",
        "TokensPerSecond": "Count/Second",
    }
    assert line.labels == {"batch_id": "batch_1"}


def test_a_lambda_is_named_by_its_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A metric without a model has one dimension less."""
    monkeypatch.setenv("POWERTOOLS_SERVICE_NAME", "dead_letters")
    emit({Metric.BATCHES_FAILED: 1}, model=None)
    [line] = lines_in(capsys.readouterr().out)
    assert line.dimensions == {"service": "dead_letters"}


def test_a_line_is_written_at_once_and_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads do not tear each other's lines, and a later kill does not lose them."""
    stream = Stream()
    monkeypatch.setattr(sys, "stdout", stream)
    emit({Metric.LEASES_LOST: 1}, model="m")
    text, flushed = stream.calls
    assert parse(text).figures == {"LeasesLost": 1}
    assert text.endswith("}\n")
    assert flushed == "flushed"


def test_an_output_that_is_gone_ends_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are worth less than the rows that they count."""
    monkeypatch.setattr(sys, "stdout", BrokenStream())
    emit({Metric.LEASES_LOST: 1}, model="m")


def test_durable_rows_count_as_what_they_cost() -> None:
    """Each field of a progress is a metric but the rates, and audio where there is some."""
    figures = figures_of(Progress(1, 2, 3, 4, 5, 6.12345, 7.0))
    assert figures == {
        Metric.ROWS_COMPLETED: 1,
        Metric.ROWS_FAILED: 2,
        Metric.PROMPT_TOKENS: 3,
        Metric.CACHED_TOKENS: 4,
        Metric.COMPLETION_TOKENS: 5,
        Metric.GPU_SECONDS: 6.123,
    }
    assert figures_of(Progress(audio_seconds=7.5))[Metric.AUDIO_SECONDS] == 7.5


def test_what_was_added_is_never_less_than_nothing() -> None:
    """A field that has fallen, as when a part cannot be read any more, adds nothing."""
    earlier, later = Progress(5, 1, 50, 5, 20, 2.0, 9.0), Progress(7, 0, 70, 9, 30, 3.5, 1.0)
    assert later.since(earlier) == Progress(2, 0, 20, 4, 10, 1.5)
    assert earlier.since(earlier) == Progress()


def test_every_metric_is_documented() -> None:
    """Each has its unit in the table of docs/reference/metrics.md, which has no others."""
    text = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([A-Z][A-Za-z]+)` \|", text, re.MULTILINE)
    assert sorted(listed) == sorted(Metric)
