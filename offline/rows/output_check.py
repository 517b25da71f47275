"""Output check: counts the successful, truncated and failed rows of an output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidemill.batch.file.rows import RAISE_LIMIT

from ..console.error_summary import ErrorSummary
from ..console.errors import CliError
from ..files.request_lines import first_value
from ..files.row_file import RowFile, plain_copy
from ..files.source import Source
from .page.open_pages import table_rows
from .view import ViewedRow, viewed_lines


@dataclass(slots=True)
class OutputReport:
    """Counts of an output's rows; `truncated` ones are successful, but reached a limit."""

    rows: int = 0
    truncated: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    failures: ErrorSummary = field(default_factory=ErrorSummary)

    @property
    def is_good(self) -> bool:
        """Return whether all rows are successful and complete."""
        return not (self.failures.count or self.truncated)

    def count(self, row: ViewedRow) -> None:
        """Count a row."""
        self.rows += 1
        if row.is_failed:
            self.failures.add(row.text, row.number)
            return
        self.finish_reasons.update(row.reasons)
        self.truncated += "length" in row.reasons

    def fields(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {
            "rows": self.rows,
            "ok": self.rows - self.failures.count,
            "truncated": self.truncated,
            "failed": self.failures.count,
            "finish_reasons": dict(sorted(self.finish_reasons.items())),
            "errors": self.failures.kinds(),
        }

    def sentences(self) -> list[str]:
        """Return the report as lines of text."""
        counts = [("rows", self.rows), ("ok", self.rows - self.failures.count)]
        counts += [("failed", self.failures.count)] if self.failures.count else []
        lines = [f"{name:<10}{count:,}" for name, count in counts]
        if self.truncated:
            reached = "reached its" if self.truncated == 1 else "reached their"
            lines.append(
                f"{'truncated':<10}{self.truncated:,} of the successful rows {reached} token "
                f"limit (finish reason `length`): {RAISE_LIMIT}"
            )
        return [*lines, *self.failures.sentences("row")]


@contextmanager
def output_rows(source: Source, tmp_dir: Path | None) -> Iterator[Iterable[ViewedRow] | None]:
    """Open the rows of an output or of a result table; yield None for any other file."""
    try:
        table = table_rows(source, source.name, None)
    except CliError:  # the check of requests reports the error
        table = None
    if table is not None and table.has_results:
        yield table.rows()
    elif _is_output(source):
        with plain_copy(source, tmp_dir) as opened:
            yield viewed_lines(RowFile(*opened))
    else:
        yield None
    source.file.seek(0)


def check_output(rows: Iterable[ViewedRow]) -> OutputReport:
    """Read all rows and return the report; raises BadInput for a line that is not a row."""
    report = OutputReport()
    for row in rows:
        report.count(row)
    return report


def _is_output(source: Source) -> bool:
    """Return whether the first line of a file is a row."""
    fields = first_value(source)
    return isinstance(fields, dict) and "response" in fields and "url" not in fields
