"""Table rows: rows of a result table for a web page, with kept columns as the request."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from tidemill.batch.file.answers import first_numbers
from tidemill.batch.file.line_blocks import PositionedStream
from tidemill.batch.file.lines import FormatError
from tidemill.batch.table.cells import output_cells, problem_of
from tidemill.batch.table.errors import TableError
from tidemill.batch.table.questions import question_columns_at_end
from tidemill.batch.table.reader import ParquetTable, Table, open_table
from tidemill.batch.table.result_columns import PREFIX

from ...console.errors import BadInput
from ...files.source import Source
from ..view import MAX_NUMBERS, ViewedRow

_BUFFER_BYTES: Final = 2**20
_RESULTS: Final = frozenset(
    "text reasoning tool_calls logprobs finish_reason embedding scores results usage".split()
)
LABELED: Final = ["label", "score", "probs"]
"""Columns of a text's labels."""
SPANS: Final = ["spans"]
"""Columns of a text's labeled spans."""
MODERATED: Final = ["flagged", "categories", "category_scores"]
"""Columns of a moderated text."""
TIMED: Final = (
    ["text", "language", "segments"],
    ["text", "language", "words"],
    ["text", "language", "segments", "words"],
)
"""Columns of a transcript with times."""
POOLED: Final = (["sparse_embedding"], ["token_embeddings"], ["token_scores"])
"""Columns of a text's sparse vector, or of numbers of its tokens."""
_NOT_SHOWN: Final = frozenset(("finish_reason", "usage", "logprobs"))
_IDS: Final = ("custom_id", "id")

_PAIR: Final = {"index", "value"}
"""Fields of each number of a sparse vector."""


class TableRow(NamedTuple):
    """A row of a table: its cells, the kept ones, and those of its answer, without prefix."""

    number: int
    custom_id: str | None
    cells: Mapping[str, Any]
    kept: Mapping[str, Any]
    answer: Mapping[str, Any]
    error: object
    is_failed: bool
    reasons: tuple[str, ...]

    @property
    def text(self) -> str:
        """Return the answer, or the error."""
        return cell_text(self.error) if self.is_failed else _lines(self.answer, bare="text")


class TableRows:
    """Rows of Parquet, Arrow, CSV or TSV; raises BadInput for any other file.

    `id_column` contains the custom IDs that are shown.
    """

    def __init__(self, source: Source, id_column: str | None = None) -> None:
        self._ids = _IDS if id_column is None else (id_column, *_IDS)
        self._source = source
        self.name = source.name
        names: list[str] = self._open().schema.names
        self._first_result = first_result(names)
        self._names = names

    @property
    def has_results(self) -> bool:
        """Return whether the table has result columns."""
        return bool(self._first_result)

    @property
    def kept_names(self) -> Sequence[str]:
        """Return the names of the columns before the result columns."""
        return self._names[: self._first_result]

    @property
    def id_column(self) -> str | None:
        """Return the kept column of custom IDs; None if there is none."""
        return next((name for name in _IDS if name in self.kept_names), None)

    def cells(self) -> Iterator[tuple[int, dict[str, Any], dict[str, Any]]]:
        """Yield the number of each row, its kept cells, and its results by name without prefix."""
        for number, cells in self._cells(1):
            kept = {name: cells[name] for name in self.kept_names}
            yield number, kept, self._results(cells)

    def rows(self) -> Iterator[ViewedRow]:
        """Yield the rows as the terminal shows them."""
        for row in self.table_rows(1):
            words = "error" if row.is_failed else ", ".join(row.reasons)
            kept = _lines(row.kept)
            yield ViewedRow(
                row.number, row.custom_id, words, row.text, row.is_failed, row.reasons, kept
            )

    def table_rows(self, first_number: int) -> Iterator[TableRow]:
        """Yield the rows; in Parquet, row groups before the first row are skipped."""
        return (self._row(number, cells) for number, cells in self._cells(first_number))

    def count(self) -> int | None:
        """Return the number of rows of a Parquet file; None for other formats."""
        table = self._open()
        return table.num_rows if isinstance(table, ParquetTable) else None

    def _open(self) -> Table:
        """Open the table with a separate file position."""
        self._source.check()
        stream = io.BufferedReader(PositionedStream(self._source.file.fileno(), 0), _BUFFER_BYTES)
        try:
            return open_table(stream)
        except (TableError, FormatError) as exc:
            raise BadInput(f"{self.name} cannot be read. {exc}") from exc

    def _cells(self, first_number: int) -> Iterator[tuple[int, dict[str, Any]]]:
        table, end = self._open(), 0
        try:
            if isinstance(table, ParquetTable):
                group, end = table.group_of(first_number - 1)
                batches = table.batches(self._names, first_group=group)
            else:
                batches = table.batches(self._names)
            for batch in batches:
                skipped = min(max(0, first_number - 1 - end), batch.num_rows)
                columns = map(_shown, batch.slice(skipped).columns)
                for place, cells in enumerate(zip(*columns, strict=True), end + skipped + 1):
                    yield place, dict(zip(self._names, cells, strict=True))
                end += batch.num_rows
        except (TableError, FormatError) as exc:
            raise BadInput(f"{self.name} cannot be read. {exc}") from exc

    def _row(self, number: int, cells: Mapping[str, Any]) -> TableRow:
        kept, by_name = self.kept_names, self._results(cells)
        error = by_name.pop("error", None) if kept or "usage" in by_name else None
        found = by_name.get("finish_reason")
        reasons = tuple(map(str, found if isinstance(found, list) else [found] if found else []))
        shown = {name: by_name[name] for name in by_name if name not in _NOT_SHOWN}
        return TableRow(
            number,
            next(
                (cell_text(cells[name]) for name in self._ids if cells.get(name) is not None), None
            ),
            cells,
            {name: cells[name] for name in kept},
            shown | {"error": error},
            error,
            # An incomplete answer has an error as well as its partial text.
            error is not None and by_name.get("usage") is None,
            tuple(dict.fromkeys(reasons)),
        )

    def _results(self, cells: Mapping[str, Any]) -> dict[str, Any]:
        results = self._names[self._first_result :]
        return {name.removeprefix(PREFIX): cells[name] for name in results}


def first_result(names: Sequence[str]) -> int:
    """Return the place of the first result column: 0 if a table has none.

    Results end with the usage and the error, followed by the fields of a JSON schema.
    """
    bare = [name.removeprefix(PREFIX) for name in names]
    ends = [at for at in range(1, len(bare)) if bare[at - 1 : at + 1] == ["usage", "error"]]
    if not ends:
        return 0
    last = ends[-1] - 1
    if questions := question_columns_at_end(bare[:last]):
        return last - sum(map(len, questions))
    for columns in (LABELED, SPANS, MODERATED, *TIMED, *POOLED):
        if bare[:last][-len(columns) :] == columns:
            return last - len(columns)
    first, seen = last, {"usage"}
    while first and bare[first - 1] in _RESULTS - seen:
        first -= 1
        seen.add(bare[first])
    return first


def _shown(column: pa.Array) -> list[Any]:
    """Return cells, or their type if the type is not supported."""
    is_readable = problem_of(column.type) is None
    return output_cells(column) if is_readable else [f"({column.type})"] * len(column)


def _lines(cells: Mapping[str, Any], bare: str | None = None) -> str:
    """Return cells as text with their names, except for the column `bare`."""
    shown = {name: cell_text(cell) for name, cell in cells.items() if cell is not None}
    return "\n".join(text if name == bare else f"{name}: {text}" for name, text in shown.items())


def cell_text(cell: object) -> str:
    """Return a cell as text: JSON for a value that is not a text, and the first of many numbers."""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, list) and cell and isinstance(cell[0], list) and len(cell[0]) > 1:
        return f"{cell_text(cell[0])}, … ({len(cell):,} lists)"
    if isinstance(cell, list) and len(cell) > MAX_NUMBERS:
        if isinstance(cell[0], float):
            return first_numbers(cell, MAX_NUMBERS)
        if isinstance(cell[0], dict) and cell[0].keys() == _PAIR:
            return first_numbers({pair["index"]: pair["value"] for pair in cell}, MAX_NUMBERS)
    if isinstance(cell, dict | list | int | float):
        return json.dumps(cell, ensure_ascii=False, default=str)
    return str(cell)
