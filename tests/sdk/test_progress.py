"""Progress of programs on a terminal and in a log; that of notebooks is in tests/examples."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill.sdk.progress import Progress, progress_of, progress_of_run


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


class Recorded:
    """A bar that keeps what it shows."""

    def __init__(self) -> None:
        self.shown: list[tuple[int, int | None, list[str]]] = []

    def show(self, done: int, total: int | None, words: list[str]) -> None:
        """Keep it."""
        self.shown.append((done, total, words))


def answer(unit: str, *, is_wanted: bool) -> None:
    """Answer three, one of which fails."""
    with progress_of(unit, 3, is_wanted=is_wanted) as progress:
        progress.add()
        progress.add(2, is_failed=True)


@pytest.mark.parametrize("make_stream", [Terminal, io.StringIO, lambda: None])
@pytest.mark.parametrize("is_wanted", [True, False])
def test_only_a_terminal_has_a_bar(
    monkeypatch: pytest.MonkeyPatch,
    make_stream: Callable[[], io.StringIO | None],
    is_wanted: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """A log has none, and neither has a terminal where none is wanted."""
    monkeypatch.setattr(sys, "stderr", stream := make_stream())
    answer("rows", is_wanted=is_wanted)
    if isinstance(stream, Terminal) and is_wanted:
        assert "3/3 1 failed" in stream.getvalue()
    elif stream is not None:
        assert stream.getvalue() == ""


def test_prints_appear_above_the_bar_or_in_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Standard output that is not a terminal is unchanged."""
    terminal, file = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", file)
    with progress_of("rows", 3, is_wanted=True):
        sys.stdout.write("to a file\n")
        monkeypatch.setattr(sys, "stdout", terminal)
        answer("inner", is_wanted=True)  # a terminal has one last line
    assert file.getvalue() == "to a file\n"
    assert "0/3" in terminal.getvalue()
    assert "failed" not in terminal.getvalue()


def test_a_run_reports_to_a_bar_to_nowhere_or_in_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """By where there is a place, and whether it is wanted."""
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with progress_of_run(is_wanted=True) as fd:
        assert fd is not None
        os.write(fd, b'{"done": 1, "total": 2, "words": ["3.0 rows/s"]}\n')
    assert "1/2 3.0 rows/s" in terminal.getvalue()
    with progress_of_run(is_wanted=False) as fd:
        assert fd is not None
        assert os.path.samestat(os.fstat(fd), Path(os.devnull).stat())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress_of_run(is_wanted=True) as fd:
        assert fd is None


def test_the_first_and_the_last_count_are_shown() -> None:
    """They appear however fast the run is; without a total, no remaining time is shown."""
    bar = Recorded()
    progress = Progress(bar, "requests", None)
    progress.refresh()
    for _ in range(1_000):
        progress.add()
    progress.refresh()
    assert bar.shown[0] == (0, None, [])
    done, total, [rate] = bar.shown[-1]
    assert (done, total) == (1_000, None)
    assert rate.endswith(" requests/s")
