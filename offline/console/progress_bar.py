"""Progress bar on a terminal: a count and words beside it, on standard error."""

from __future__ import annotations

from collections.abc import Sequence

from .terminal import bar_width, fit_words


class TerminalBar:
    """Progress bar on the terminal of standard error, drawn by `show` from `start` to `stop`.

    With `redirect_stdout` what the program prints stands above it.
    """

    def __init__(self, *, redirect_stdout: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        console = Console(stderr=True)
        self._bar = BarColumn(bar_width(console.width))
        self._progress = Progress(
            self._bar,
            TextColumn("{task.description} {task.fields[words]}", markup=False),
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=redirect_stdout,
        )
        self._task = self._progress.add_task("", total=None, words="")

    def start(self) -> None:
        """Take the last line of the terminal."""
        self._progress.start()

    def stop(self) -> None:
        """Remove the bar."""
        self._progress.stop()

    def show(
        self,
        done: int,
        total: int | None,
        words: Sequence[str],
        *,
        label: str = "",
        dropped_first: Sequence[str] = (),
    ) -> None:
        """Draw the bar; without a total it moves all the time."""
        columns = self._progress.console.width
        self._bar.bar_width = bar_width(columns)
        count = f"{label}{done}" if total is None else f"{label}{done}/{total}"
        room = columns - bar_width(columns) - len(count) - 2
        self._progress.update(
            self._task,
            description=count,
            total=total,
            completed=done,
            words=fit_words(words, room, dropped_first),
            refresh=True,
        )
