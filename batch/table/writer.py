"""Table writers: record batches as Parquet, Arrow IPC, CSV, TSV or JSON lines."""

from __future__ import annotations

import csv
import io
from typing import IO, Any, Final, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import ipc
from pydantic_core import to_json

from ..file.rows import escape_separators
from .recipe import TableFormat

_GROUP_ROWS: Final = 2**17
_GROUP_BYTES: Final = 2**26
_DELIMITERS: Final = {"csv": ",", "tsv": "\t"}


class TableWriter(Protocol):
    """Writes batches of one schema; `close` ends the file."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Write the rows of a batch behind those before."""

    def close(self) -> None:
        """Write what is left; the file itself stays open."""


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


class ParquetWriter:
    """Parquet with zstd, in row groups of a bounded size; vectors as they are."""

    def __init__(self, file: IO[bytes], schema: pa.Schema) -> None:
        self._schema = schema
        # No two vectors have numbers in common, so dictionaries and compression only take time.
        vectors = [field.name for field in schema if pa.types.is_fixed_size_list(field.type)]
        self._writer = pq.ParquetWriter(
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
        """Hold the rows until they make a row group."""
        self._held.append(batch)
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
    """Arrow IPC; dictionaries are written out, as a file has but one for each column."""

    def __init__(self, file: IO[bytes], schema: pa.Schema) -> None:
        self._schema = pa.schema([_decoded(field) for field in schema])
        self._writer = ipc.new_file(file, self._schema)

    def write(self, batch: pa.RecordBatch) -> None:
        """Write a batch."""
        self._writer.write_batch(batch.cast(self._schema))

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
        columns = [[_cell(value) for value in values] for values in _values(batch)]
        self._write(zip(*columns, strict=True))

    def close(self) -> None:
        """Do nothing: every row is written."""

    def _write(self, rows: Any) -> None:
        text = io.StringIO()
        csv.writer(text, delimiter=self._delimiter, lineterminator="\n").writerows(rows)
        self._file.write(text.getvalue().encode())


class JsonWriter:
    """JSON lines, an object for each row."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, batch: pa.RecordBatch) -> None:
        """Write the rows of a batch."""
        names = batch.schema.names
        rows = zip(*_values(batch), strict=True)
        for row in rows:
            cells = dict(zip(names, row, strict=True))
            data = to_json(cells, inf_nan_mode="null", bytes_mode="base64")
            self._file.write(escape_separators(data) + b"\n")

    def close(self) -> None:
        """Do nothing: every row is written."""


def _decoded(field: pa.Field) -> pa.Field:
    is_dictionary = pa.types.is_dictionary(field.type)
    return field.with_type(field.type.value_type) if is_dictionary else field


def _values(batch: pa.RecordBatch) -> list[list[Any]]:
    """Return the columns as Python values, dates and times as text."""
    columns = []
    for column in batch.columns:
        kind = column.type
        is_text = pa.types.is_temporal(kind) or pa.types.is_decimal(kind)
        columns.append((column.cast(pa.string()) if is_text else column).to_pylist())
    return columns


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, dict, bytes)):
        return to_json(value, inf_nan_mode="null", bytes_mode="base64").decode()
    return value
