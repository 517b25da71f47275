"""Unflushed rows of a shard, and rows that a worker writes without its engine."""

from __future__ import annotations

from collections.abc import Iterable

from tidemill.batch.file.lines import LineError, RawLine, parse_line
from tidemill.batch.file.rows import print_malformed, print_reply
from tidemill.batch.parts import FinishedRow
from tidemill.batch.suspects import KILLED_MESSAGE
from tidemill.protocol.bodies import error_body
from tidemill.protocol.errors import RequestError


class Unflushed:
    """Finished rows that are not durable; `oldest_at` is the oldest one's time (None: no rows)."""

    def __init__(self) -> None:
        self.rows: list[FinishedRow] = []
        self.num_bytes = 0
        self.oldest_at: float | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, row: FinishedRow, now: float) -> None:
        """Add a row that was finished now."""
        self.rows.append(row)
        self.num_bytes += len(row.row)
        if self.oldest_at is None:
            self.oldest_at = now

    def drop(self, count: int, taken_at: float) -> None:
        """Drop the first `count` rows, all rows at `taken_at`, which are durable now."""
        self.num_bytes -= sum(len(row.row) for row in self.rows[:count])
        del self.rows[:count]
        self.oldest_at = taken_at if self.rows else None

    def due_in(self, now: float, *, flush_seconds: float, flush_bytes: int) -> float | None:
        """Return the seconds until the rows must be flushed; None when there are none."""
        if self.oldest_at is None:
            return None
        if self.num_bytes >= flush_bytes:
            return 0.0
        return max(0.0, self.oldest_at + flush_seconds - now)


def print_unrun(raw: RawLine, *, is_quarantined: bool) -> FinishedRow | None:
    """Return the row of a line that must not be sent to the engine; None for any other line.

    Such a line is quarantined, or was too long to be kept in memory.
    """
    if not is_quarantined and raw.overlong is None:
        return None
    try:
        line = parse_line(raw)
    except LineError as exc:
        return FinishedRow(raw.number, print_malformed(raw.digest, exc), is_success=False)
    error = RequestError(KILLED_MESSAGE, code="engine_killed", status_code=500, type="server_error")
    row = print_reply(line, error.status_code, error_body(error))
    return FinishedRow(raw.number, row, is_success=False)


def compact(lines: Iterable[int]) -> str:
    """Return line numbers as ranges for logs: `1-5,7`."""
    runs: list[list[int]] = []
    for number in sorted(lines):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
