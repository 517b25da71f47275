"""Progress bar on a terminal, otherwise progress lines, and the summary of a run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol, Self

from tidemill.batch.file.rows import RAISE_LIMIT
from tidemill.batch.file.throughput import Rates, format_rate, seconds_left

from ..console.progress_bar import TerminalBar, progress_text
from ..console.terminal import amount, duration, log
from .tally import Tally

if TYPE_CHECKING:
    from types import TracebackType

PROGRESS_FD: Final = "TIDEMILL_PROGRESS_FD"
"""Environment variable: file descriptor of the pipe from which a Python program reads progress."""

LINE_SECONDS = 5.0
BAR_SECONDS = 0.25


class Reporter(Protocol):
    """Context manager that shows progress; `seconds` is its update interval."""

    seconds: float

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def show(self, tally: Tally, rates: Rates, left: float | None = None) -> None:
        """Show the current counts and rates, and the seconds left if they are known."""


def make_reporter(tally: Tally) -> Reporter:
    """Return a reporter: a pipe if one is given, a bar on a terminal, otherwise lines."""
    if fd := os.environ.get(PROGRESS_FD):
        return PipeReporter(int(fd), tally)
    if sys.stderr.isatty():
        return BarReporter(tally)
    return LineReporter()


class LineReporter:
    """Prints a progress line at each update."""

    seconds = LINE_SECONDS

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Do nothing."""

    def show(self, tally: Tally, rates: Rates, left: float | None = None) -> None:
        """Print the line."""
        log(progress_line(tally, rates, left))


class BarReporter:
    """Draws a progress bar with the counts and rates next to it."""

    seconds = BAR_SECONDS

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._bar = TerminalBar()

    def __enter__(self) -> Self:
        self._bar.start()
        self._show(())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def show(self, tally: Tally, rates: Rates, left: float | None = None) -> None:
        """Update the bar."""
        self._show(_words(tally, rates, left), (rates.main_rate, rows_rate(rates)))

    def _show(self, words: Sequence[str], dropped_first: Sequence[str] = ()) -> None:
        tally = self._tally
        self._bar.show(
            tally.rows_done,
            tally.num_rows,
            words,
            label=tally.label,
            dropped_first=dropped_first,
        )


class PipeReporter:
    """Writes lines of JSON to a pipe, for the program that started this run."""

    seconds = BAR_SECONDS

    def __init__(self, fd: int, tally: Tally) -> None:
        self._fd = fd
        self._tally = tally

    def __enter__(self) -> Self:
        self._write(())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._write(_failed(self._tally))

    def show(self, tally: Tally, rates: Rates, left: float | None = None) -> None:
        """Write the counts."""
        self._write(_words(tally, rates, left))

    def _write(self, words: Sequence[str]) -> None:
        line = {"done": self._tally.rows_done, "total": self._tally.num_rows, "words": [*words]}
        with suppress(OSError):  # the program has exited, which also ends this process
            os.write(self._fd, json.dumps(line).encode() + b"\n")


def progress_line(tally: Tally, rates: Rates, left: float | None = None) -> str:
    """Return `120 of 1,000 rows, 3 failed, 40.1 rows/s, 5,120 tokens/s, 22 s left`."""
    words = _words(tally, rates, left)
    return tally.label + progress_text(tally.rows_done, tally.num_rows, "rows", words)


def estimate_left(
    tally: Tally, rates: Rates, recent: Rates, forecast: float | None
) -> float | None:
    """Return the seconds left: the forecast, or the time of the remaining rows at their rate.

    The forecast is limited to the time at the `recent` rate, because answers may be much shorter
    than expected. At the end, rows with long answers finish slowly, and the forecast is lower.
    """
    if forecast is None:
        num_rows = max(1, tally.num_rows - tally.kept)
        share = tally.answered / num_rows
        return seconds_left(share, tally.seconds, rates.rows_per_second / num_rows)
    if not recent.rows_per_second:
        return forecast
    return min(forecast, (tally.num_rows - tally.rows_done) / recent.rows_per_second)


def _words(tally: Tally, rates: Rates, left: float | None) -> list[str]:
    words = [*_failed(tally), rows_rate(rates), rates.main_rate]
    if left is None or tally.rows_done >= tally.num_rows:
        return words
    return [*words, f"{duration(left)} left"]


def _failed(tally: Tally) -> list[str]:
    return [f"{tally.rows_failed:,} failed"] if tally.rows_failed else []


def rows_rate(rates: Rates) -> str:
    """Return `40.1 rows/s`."""
    return f"{rates.rows_per_second:,.1f} rows/s"


def summary(tally: Tally) -> str:
    """Return the summary of a run: successful and failed rows, tokens, time and rate.

    It is followed by a line for each kind of failure, and the number of truncated answers.
    """
    seconds, usage = tally.seconds, tally.usage
    rows = amount(tally.answered, "row")
    outcome = f"{tally.answered - tally.failed:,} ok, {tally.failed:,} failed"
    tokens_in = f"{amount(usage.prompt_tokens, 'token')} in"
    if usage.prompt_tokens and not usage.completion_tokens:
        parts = [tokens_in]
    else:
        thought = f" ({usage.reasoning_tokens:,} reasoning)" if usage.reasoning_tokens else ""
        out = f"{usage.completion_tokens:,} out{thought}"
        parts = [f"{tokens_in} ({usage.cached_tokens:,} cached)", out]
    if usage.audio_seconds:
        parts.insert(0, f"{usage.audio_seconds:,.1f} s of audio")
    costs = (usage.completion_tokens, usage.prompt_tokens, usage.audio_seconds)
    parts.append(format_rate(*(each / seconds for each in costs)))
    words = f"{tally.label}{rows} in {seconds:,.1f} s: {outcome}; {', '.join(parts)}"
    if tally.kept:
        all_ok = tally.rows_done - tally.rows_failed
        ways = ((tally.kept - tally.reused, "kept from earlier"), (tally.reused, "reused"))
        kept = " and ".join(f"{amount(num, 'row')} {how}" for num, how in ways if num)
        words += f"; with {kept}: {all_ok:,} ok, {tally.rows_failed:,} failed"
    return "\n".join((words, *tally.failures.sentences(tally.unit), *truncated_words(tally)))


def truncated_words(tally: Tally) -> list[str]:
    """Return a sentence about truncated answers in the output; empty without any."""
    if not tally.truncated:
        return []
    answers = amount(tally.truncated, "answer")
    return [f"  {answers} reached the token limit (finish reason `length`): {RAISE_LIMIT}"]
