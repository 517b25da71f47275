"""Table sample: some rows of a table, written as a table with the same columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Final

import pyarrow as pa

from tidemill.batch.file.lines import FormatError
from tidemill.batch.table.errors import TableError
from tidemill.batch.table.reader import ParquetTable, Table, open_table, read_rows
from tidemill.batch.table.recipe import TableFormat
from tidemill.batch.table.writer import open_writer

from ..console.errors import BadInput, Refused
from .new_file import open_new_file
from .paths import STANDARD_STREAM
from .request_lines import choose_sample
from .source import Source
from .table_options import format_of

_BINARY: Final = frozenset(("parquet", "arrow"))


def sample_table(source: Source, size: int, seed: int, output: str) -> tuple[int, int]:
    """Write a uniform random sample of a table's rows; return its size, and the number of all rows.

    The suffix determines the output's format; the default is the table's. Raises BadInput for a
    damaged table, and Refused for a binary format on standard output.
    """
    try:
        table = open_table(source.file)
        form = _format_of_output(output) or table.format
        if form in _BINARY and output == STANDARD_STREAM:
            raise Refused(f"a sample of {source.name} is binary: choose an output file with -o")
        num_rows = _count_rows(table)
        places = choose_sample(num_rows, size, seed)
        with open_new_file(output) as out, out.opened() as file:
            _write_rows(table, places, form, file)
    except (TableError, FormatError) as exc:
        raise BadInput(f"{source.name} cannot be read. {exc}") from exc
    return len(places), num_rows


def _format_of_output(output: str) -> TableFormat | None:
    return None if output == STANDARD_STREAM else format_of(output)


def _count_rows(table: Table) -> int:
    if isinstance(table, ParquetTable):
        return table.num_rows
    return sum(batch.num_rows for batch in read_rows(table, ()))


def _write_rows(table: Table, places: Sequence[int], form: TableFormat, file: IO[bytes]) -> None:
    """Write the rows at ascending places."""
    writer = open_writer(file, table.schema, form)
    first = num_written = 0
    for batch in table.batches(table.schema.names):
        start = num_written
        while num_written < len(places) and places[num_written] < first + batch.num_rows:
            num_written += 1
        if num_written > start:
            chosen = places[start:num_written]
            writer.write(batch.take(pa.array([place - first for place in chosen])))
        first += batch.num_rows
    writer.close()
