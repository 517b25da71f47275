"""What a run has done so far, counted in one place for progress, metrics and summary."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from cli.kinds import Kinds
from engine.contract import Usage


@dataclass(slots=True)
class Tally:
    """Counts of one run; `kept` rows are those that a resumed output already had.

    `usage` is that of answered requests; `started` is on the monotonic clock.
    """

    num_rows: int = 0
    kept: int = 0
    kept_ok: int = 0
    answered: int = 0
    failed: int = 0
    written: int = 0
    usage: Usage = field(default_factory=Usage)
    failures: Kinds = field(default_factory=Kinds)
    started: float = field(default_factory=time.monotonic)

    def count(
        self, usage: Usage | None = None, *, failure: str | None = None, line: int | None = None
    ) -> None:
        """Count one more line that has its row; `failure` says why it is no success."""
        self.answered += 1
        if failure is not None:
            self.failed += 1
            self.failures.add(failure, line)
        if usage is not None:
            self.usage += usage

    @property
    def rows_done(self) -> int:
        """Lines that have their row, kept ones included."""
        return self.kept + self.answered

    @property
    def rows_failed(self) -> int:
        """Those of `rows_done` that are not a success."""
        return self.kept - self.kept_ok + self.failed

    @property
    def seconds(self) -> float:
        """Time since `started`."""
        return max(time.monotonic() - self.started, 1e-9)
