"""Rows of a table for the page: kept columns are the request, result columns the answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from tidemill.dashboard.row_facts import RowFacts
from tidemill.dashboard.row_query import RowQuery
from tidemill.dashboard.row_view import RowView, columns_view
from tidemill.dashboard.rows_page import FoundRows, Requests

from .table_rows import TableRow, TableRows, cell_text

SEARCHED_ROWS: Final = 200_000
"""Rows that one search reads at most: a few seconds."""


class TablePage:
    """The rows of a table."""

    def __init__(self, table: TableRows) -> None:
        self._table = table

    @property
    def num_rows(self) -> int | None:
        """Return the number of rows of a Parquet file; None for other formats."""
        return self._table.count()

    def search(self, query: RowQuery, limit: int) -> FoundRows:
        """Return the rows that match."""
        found: list[RowView] = []
        through = query.begin - 1
        for row in self._table.table_rows(max(1, query.begin)):
            if query.line not in {None, row.number}:
                break
            facts = _facts(row)
            if _matches(query, facts, row):
                if len(found) == limit:
                    return FoundRows(found, found[-1].line, found[-1].line)
                found.append(_view(row, facts, is_full=query.line is not None))
            through = row.number
            if query.line is not None:
                break
            if through - query.after >= SEARCHED_ROWS:
                return FoundRows(found, through, through)
        return FoundRows(found, through)

    def requests(self, lines: Sequence[int]) -> Requests:
        """Return none: each row has its request in its columns."""
        del lines
        return Requests({}, "")


def _facts(row: TableRow) -> RowFacts:
    status = "failed" if row.is_failed else "truncated" if "length" in row.reasons else "ok"
    found = (_confidence(cell) for name, cell in row.answer.items() if name.endswith("_confidence"))
    known = [value for value in found if value is not None]
    return RowFacts(
        row.custom_id,
        status,  # type: ignore[arg-type]
        row.text,
        reasons=row.reasons,
        confidence=min(known, default=None),
    )


def _confidence(cell: object) -> float | None:
    """Return a number between 0 and 1, which text formats have as text; None for other cells."""
    try:
        value = float(str(cell))
    except ValueError:
        return None
    return value if 0 <= value <= 1 else None


def _matches(query: RowQuery, facts: RowFacts, row: TableRow) -> bool:
    """Return whether a row matches; a text may also be in its kept columns."""
    if query.matches(facts):
        return True
    text = query.text.casefold()
    is_kept = bool(text) and any(text in cell_text(cell).casefold() for cell in row.kept.values())
    return is_kept and replace(query, text="").matches(facts)


def _view(row: TableRow, facts: RowFacts, *, is_full: bool) -> RowView:
    as_json = partial(json.dumps, indent=2, ensure_ascii=False, default=cell_text)
    return columns_view(
        row.number,
        facts,
        {name: cell_text(cell) for name, cell in row.kept.items() if cell is not None},
        {name: cell_text(cell) for name, cell in row.answer.items() if cell is not None},
        as_json(row.cells) if is_full else "",
    )
