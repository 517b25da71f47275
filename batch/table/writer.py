"""Table writers: record batches as Parquet, Arrow IPC, CSV, TSV or JSON lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any, Final, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import ipc
from pydantic_core import to_json

from ..file.rows import escape_separators
from .cells import output_cells
from .csv_text import csv_text
from .recipe import TableFormat
from .stored_types import as_stored, stored_type

_GROUP_ROWS: Final = 2**17
_GROUP_BYTES: Final = 2**26
_DELIMITERS: Final = {"csv": ",", "tsv": "\t"}


class TableWriter(Protocol):
    """Writes batches of one schema; `close` completes the file."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Write the rows of a batch after the previous ones."""

    def close(self) -> None:
        """Write the remaining rows; the file itself stays open."""


def open_writer(file: IO[bytes], schema: pa.Schema, form: TableFormat) -> TableWriter:
    """Return the writer of a format."""
    match form:
        case "parquet":
            return ParquetWriter(file, schema)
        case "arrow":
            return ArrowWriter(file, schema)
        case "csv" | "tsv":
            return CsvWriter(file, schema, _DELIMITERS[form])
        case "jsonl":
            return JsonWriter(file)


class _GroupWriter(pq.ParquetWriter):  # type: ignore[misc]  # pyarrow has no types
    """Writer that is closed only on request: after a failure, its file may be closed already."""

    def __del__(self) -> None:
        """Do nothing, instead of printing that the file cannot be completed."""


class ParquetWriter:
    """Parquet with zstd, in row groups of bounded size; vectors are uncompressed."""

    def __init__(self, file: IO[bytes], schema: pa.Schema) -> None:
        self._schema = schema = _stored(schema, "parquet")
        # Vectors have no numbers in common, so dictionaries and compression only cost time.
        vectors = [field.name for field in schema if pa.types.is_fixed_size_list(field.type)]
        self._writer = _GroupWriter(
            file,
            schema,
            compression={
                field.name: "none" if field.name in vectors else "zstd" for field in schema
            },
            use_dictionary=[field.name for field in schema if field.name not in vectors],
        )
        self._held: list[pa.RecordBatch] = []
        self._num_rows = self._num_bytes = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Buffer the rows until they fill a row group."""
        self._held.append(_converted(batch, self._schema))
        self._num_rows += batch.num_rows
        self._num_bytes += batch.nbytes
        if self._num_rows >= _GROUP_ROWS or self._num_bytes >= _GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        """Write the last row group and the footer."""
        if self._held:
            self._flush()
        self._writer.close()

    def _flush(self) -> None:
        table = pa.Table.from_batches(self._held, self._schema)
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._held, self._num_rows, self._num_bytes = [], 0, 0


class ArrowWriter:
    """Arrow IPC; dictionaries are decoded, because a file has only one for each column."""

    def __init__(self, file: IO[bytes], schema: pa.Schema) -> None:
        self._schema = _stored(schema, "arrow")
        self._writer = ipc.new_file(file, self._schema)

    def write(self, batch: pa.RecordBatch) -> None:
        """Write a batch."""
        self._writer.write_batch(_converted(batch, self._schema))

    def close(self) -> None:
        """Write the footer."""
        self._writer.close()


class CsvWriter:
    """CSV or TSV with a header; nulls are empty cells, nested values JSON."""

    def __init__(self, file: IO[bytes], schema: pa.Schema, delimiter: str) -> None:
        self._file = file
        self._delimiter = delimiter
        self._write([schema.names])

    def write(self, batch: pa.RecordBatch) -> None:
        """Write the rows of a batch."""
        columns = []
        for each in batch.columns:
            cells = output_cells(each)
            is_text = pa.types.is_string(each.type)
            columns.append(cells if is_text else [_csv_cell(value) for value in cells])
        self._write(list(zip(*columns, strict=True)))

    def close(self) -> None:
        """Do nothing: all rows are written."""

    def _write(self, rows: Sequence[Sequence[Any]]) -> None:
        self._file.write(csv_text(rows, self._delimiter).encode())


class JsonWriter:
    """JSON lines, one object per row."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, batch: pa.RecordBatch) -> None:
        """Write the rows of a batch."""
        names = batch.schema.names
        for row in zip(*map(output_cells, batch.columns), strict=True):
            data = to_json(dict(zip(names, row, strict=True)), inf_nan_mode="null")
            self._file.write(escape_separators(data) + b"\n")

    def close(self) -> None:
        """Do nothing: all rows are written."""


def _stored(schema: pa.Schema, form: TableFormat) -> pa.Schema:
    return pa.schema([field.with_type(stored_type(field.type, form)) for field in schema])


def _converted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch in the types of a schema."""
    columns = map(as_stored, batch.columns, schema.types)
    return pa.RecordBatch.from_arrays(list(columns), schema=schema)


def _csv_cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, dict)):
        return to_json(value, inf_nan_mode="null").decode()
    return value
