"""Progress lines during a run, and the summary at its end."""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import termios
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.offline.given import CHAT, line
from tests.offline.scripted import ScriptedEngine
from tidemill.batch.file.throughput import Countdown, Rates, RateWindow
from tidemill.offline.plan.forecast import Forecast
from tidemill.offline.plan.line_index import LineIndex
from tidemill.offline.plan.plan import Plan
from tidemill.offline.run import progress
from tidemill.offline.run import run as run_module
from tidemill.offline.run.progress import estimate_left, progress_line, summary
from tidemill.offline.run.tally import Tally, UsageTotal
from tidemill.protocol.contract import EngineStats

Write = Callable[..., Path]


@pytest.fixture
def tally(monkeypatch: pytest.MonkeyPatch) -> Tally:
    """Return 10 seconds of a run with 400 of 1,000 rows answered, after 100 kept ones."""
    monkeypatch.setattr(time, "monotonic", lambda: 110.0)
    return Tally(
        num_rows=1_500,
        kept=100,
        kept_ok=90,
        answered=400,
        failed=3,
        usage=UsageTotal(8_000, 1_024, 2_000),
        started=100.0,
    )


def test_a_line_shows_rows_rates_and_the_remaining_time(tally: Tally) -> None:
    """Kept rows count neither for the rate nor for the remaining time."""
    rates = Rates(40.0, 5_120.0)
    left = estimate_left(tally, rates, rates, None)
    assert progress_line(tally, rates, left) == (
        "500 of 1,500 rows, 13 failed, 40.0 rows/s, 5,120 tokens/s, 25 s left"
    )


async def test_the_time_left_is_bounded_by_rows_and_counts_down_while_none_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the first row, and after the estimate has elapsed, no time is shown."""
    served, tally, now = ScriptedEngine(), Tally(num_rows=100), 0.0
    tally.started -= 100
    expected: list[float | None] = []
    ended = asyncio.Event()
    rows = iter([0, 0, 40, 0, 0, 0, 0, 0, 1])

    class Watching(progress.LineReporter):
        seconds = 0.0

        def show(self, tally: Tally, _: Rates, left: float | None = None) -> None:
            nonlocal now
            expected.append(None if left is None else round(left, 1))
            now += 2.0
            if (num_rows := next(rows, None)) is None:
                ended.set()
            for _row in range(num_rows or 0):
                tally.count()

    def clock() -> float:
        return now

    monkeypatch.setattr(run_module, "RateWindow", lambda _, *given: RateWindow(clock, *given))
    monkeypatch.setattr(run_module, "Countdown", lambda _: Countdown(clock))
    with closing(LineIndex()) as index:
        forecast = Forecast(Plan(index, lambda _: False), 1)
        monkeypatch.setattr(Forecast, "seconds_left", lambda _: 60.0)
        reporting = asyncio.create_task(run_module._report(Watching(), tally, served, forecast))
        await ended.wait()
        reporting.cancel()
    # 40 of 100 rows in 6 seconds; the next row comes 12 seconds later, when the forecast is less.
    assert expected == [None, None, None, 9.0, 7.0, 5.0, 3.0, 1.0, None, 60.0]


def test_a_forecast_is_bounded_by_the_recent_rate_of_rows() -> None:
    """A forecast of long answers gives way to rows that come faster, and ends with the last."""
    tally = Tally(num_rows=100, answered=50)
    for recent, left in ((Rates(50.0), 1.0), (Rates(0.1), 60.0), (Rates(), 60.0)):
        assert estimate_left(tally, Rates(), recent, 60.0) == left
    tally.answered = 100
    assert "left" not in progress_line(tally, Rates(50.0, 1.0), 60.0)


def test_no_time_is_left_to_tell_before_the_first_row() -> None:
    """Zero is not divided by zero."""
    assert estimate_left(Tally(num_rows=3), Rates(), Rates(), None) is None
    line = progress_line(Tally(num_rows=3), Rates(0.0, 0.0))
    assert line == "0 of 3 rows, 0.0 rows/s, 0 tokens/s"


def test_an_unknown_time_is_not_shown(tally: Tally) -> None:
    """At the beginning it is unknown, until there are enough rows or seconds."""
    tally.num_rows, rates = 10**6, Rates(40.0, 1.0)
    assert estimate_left(tally, rates, rates, None) is None
    tally.started = 90.0
    left = estimate_left(tally, rates, rates, None)
    assert progress_line(tally, rates, left).endswith(", 6 h 56 min left")


async def test_tokens_are_shown_as_they_are_generated_and_rows_as_they_finish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They do not wait for written rows, so a long first answer does not look like a hang."""
    served, tally, seen = ScriptedEngine(), Tally(num_rows=100), asyncio.Event()
    tokens = iter([40, *[100] * 1_000])
    monkeypatch.setattr(served, "stats", lambda: EngineStats(output_tokens=next(tokens)))
    shown: list[Rates] = []

    class Watching(progress.LineReporter):
        seconds = 0.0

        def show(self, tally: Tally, rates: Rates, left: float | None = None) -> None:
            assert left is None
            shown.append(rates)
            if len(shown) == 1:
                tally.count()
            else:
                seen.set()

    with closing(LineIndex()) as index:
        forecast = Forecast(Plan(index, lambda _: False), 1)
        reporting = asyncio.create_task(run_module._report(Watching(), tally, served, forecast))
        await seen.wait()
        reporting.cancel()
    assert shown[:2] == [Rates(0.0, 40.0), Rates(1.0, 100.0)]


def test_a_summary_of_embeddings_shows_prompt_tokens(tally: Tally) -> None:
    """Nothing is generated, so completion tokens are omitted."""
    tally.kept, tally.usage = 0, UsageTotal(prompt_tokens=80_000)
    expected = "400 rows in 10.0 s: 397 ok, 3 failed; 80,000 tokens in, 8,000 tokens in/s"
    assert summary(tally) == expected


def test_a_summary_of_recordings_shows_seconds_of_audio(tally: Tally) -> None:
    """They are shown in addition to the completion tokens."""
    tally.kept, tally.usage = 0, UsageTotal(1_600, 0, 2_000, 600.0)
    assert summary(tally) == (
        "400 rows in 10.0 s: 397 ok, 3 failed; 600.0 s of audio, 1,600 tokens in (0 cached), "
        "2,000 out, 60.0 s of audio/s"
    )


def test_a_summary_shows_reasoning_tokens(tally: Tally) -> None:
    """They follow the completion tokens, which include them."""
    tally.kept, tally.usage = 0, UsageTotal(1_600, 0, 2_000, reasoning_tokens=1_500)
    assert "1,600 tokens in (0 cached), 2,000 out (1,500 reasoning), 200 tokens/s" in summary(tally)


def test_a_summary_shows_rows_tokens_and_time(tally: Tally) -> None:
    """Kept rows are counted separately."""
    assert summary(tally) == (
        "400 rows in 10.0 s: 397 ok, 3 failed; 8,000 tokens in (1,024 cached), 2,000 out, "
        "200 tokens/s; with 100 rows kept from earlier: 487 ok, 13 failed"
    )


def test_lines_come_now_and_then_where_there_is_no_terminal(
    run: Any,
    write_input: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Loading, progress and summary are on standard error; standard output stays empty."""
    monkeypatch.setattr(progress.LineReporter, "seconds", 0.02)
    source = write_input(line("a"), line("b", wait=0.2, status=400))
    assert run("-i", source, "-o", tmp_path / "out") == 0
    output = capsys.readouterr()
    assert output.out == ""
    assert "tidemill: 1 of 2 rows, " in output.err
    lines = output.err.splitlines()
    loading = lines.index("tidemill: loading m")  # after the notes on the script
    assert lines[loading + 1].startswith("tidemill: model loaded in ")
    assert ": 1 ok, 1 failed; 10 tokens in (4 cached), 3 out, " in lines[-2]
    assert lines[-1] == f"  1 × No {CHAT}. (line 2)"


def test_a_terminal_gets_a_bar(
    spawn: Callable[..., Any], write_input: Write, tmp_path: Path
) -> None:
    """It moves while the run goes on, and warnings and summary are still there."""
    source = write_input(line("a"), line("a", wait=0.8))
    text = on_terminal(spawn, "-i", source, "-o", tmp_path / "out")
    assert "1/2" in text
    assert "rows/s" in text
    assert "warning: 1 line repeats" in text
    assert "2 rows in" in text


def test_a_narrow_terminal_keeps_the_count(
    spawn: Callable[..., Any], write_input: Write, tmp_path: Path
) -> None:
    """Tokens go first; while the model loads something moves."""
    source = write_input(line("a"), line("b", wait=0.6))
    flags = ["-i", source, "-o", tmp_path / "out"]
    text = on_terminal(spawn, *flags, columns=40, options=["--load-seconds", "0.3"])
    assert "0:00:00" in text
    assert "1/2" in text
    assert "rows/s" in text
    assert "tokens/s" not in text.partition("2 rows in")[0]


def on_terminal(
    spawn: Callable[..., Any],
    *arguments: object,
    columns: int = 100,
    options: list[str] | None = None,
) -> str:
    """Return what a run shows on a terminal."""
    terminal, side = os.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    given = {"stdin": side, "stderr": side, "env": env | {"TERM": "xterm"}}
    process = spawn(*arguments, **given, options=options)
    os.close(side)
    shown = b""
    try:
        while chunk := os.read(terminal, 4096):
            shown += chunk
    except OSError:
        # How a terminal says that the other side has gone.
        pass
    os.close(terminal)
    assert process.wait(timeout=120) == 0
    return shown.decode()


def test_nothing_to_run_is_reported(
    run: Any, write_input: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The input is empty, or the output is already complete."""
    out = tmp_path / "out"
    run("-i", write_input(), "-o", out)
    assert capsys.readouterr().err == "tidemill: the input has no lines: nothing to run\n"
    run("-i", write_input(line("a")), "-o", out)
    capsys.readouterr()
    run("-i", write_input(line("a")), "-o", out, "--resume")
    assert capsys.readouterr().err.splitlines()[-1] == (
        "tidemill: every line has its row already (1): nothing to run"
    )
