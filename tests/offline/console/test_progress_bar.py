"""Progress bars on a terminal, and the lines of a log."""

from __future__ import annotations

import io
import sys
import time

import pytest

from tidemill.offline.console.progress_bar import TerminalBar, byte_progress, progress_text


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        """Return that it is one."""
        return True


def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make standard error a terminal of 100 columns, and return it."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    return stream


def test_a_bar_has_its_count_and_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count stays without a total."""
    terminal = terminal_of(monkeypatch)
    with TerminalBar() as bar:
        bar.show(1, None, ["2.0 rows/s"], label="shard 2 of 3: ")
        bar.show(3, 4, ["1 failed", "2.0 rows/s"])
    shown = terminal.getvalue()
    assert "shard 2 of 3: 1 2.0 rows/s" in shown
    assert "3/4 1 failed, 2.0 rows/s" in shown
    assert shown.endswith("\x1b[2K")  # the line is erased


def test_a_titled_bar_has_a_count_where_there_is_a_total(monkeypatch: pytest.MonkeyPatch) -> None:
    """A title may come with markup, which is shown as it is."""
    terminal = terminal_of(monkeypatch)
    with TerminalBar(is_titled=True) as bar:
        bar.show(0, None, ["waits"], title="[b]validating")
        bar._progress.refresh()
        bar.show(3, 4, ["2.0 rows/s"], title="in_progress")
    shown = terminal.getvalue()
    assert "[b]validating" in shown
    assert "0 waits" not in shown
    assert "in_progress" in shown
    assert "3/4 2.0 rows/s" in shown


def test_text_has_the_total_where_there_is_one() -> None:
    """Notebooks and logs use the same words."""
    assert progress_text(1_200, 3_000, "rows", ["1 failed"]) == "1,200 of 3,000 rows, 1 failed"
    assert progress_text(1_200, None, "requests", []) == "1,200 requests"


def test_bytes_are_logged_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first line comes after the first five seconds; bytes may be taken back."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with byte_progress("uploading", 10_000_000, 2_000_000) as advance:
        advance(1_000_000)
        now += 5.0
        advance(4_000_000)
        advance(1_000_000)
        now += 5.0
        advance(-4_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "tidemill: uploading: 7 of 10 MB",
        "tidemill: uploading: 4 of 10 MB",
    ]
