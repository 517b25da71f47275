"""Table readers: Parquet, Arrow IPC, CSV and JSON lines as record batches of bounded size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import compute, ipc

from ..file.formats import (
    HEAD_BYTES,
    BinaryFile,
    array_lines,
    detect_compression,
    is_array_of_objects,
    mistake_of_lines,
)
from ..file.lines import BOM, JSON_WHITE_SPACE
from .arrow_sizes import check_batches
from .cells import cells_of
from .detection import ARROW_FILE, ARROW_STREAM, PARQUET
from .errors import RAISED_BY_INPUT, TableError, reason_of
from .parquet_sizes import Chunk, check_chunks, probe_rows, read_chunks
from .recipe import TableFormat
from .request_template import RequestTemplate
from .row_slices import row_slices
from .text_reader import CsvTable, JsonTable

_BATCH_BYTES = 2**24
_MAX_BATCH_BYTES = 2**26
# Read buffer of a column that is read row by row; without one the whole column would be read.
_BUFFER_BYTES = 2**22
_MAX_BATCH_ROWS = 2**13
_PROBED_ROWS = 16
_MAX_NAMED = 5
_MAX_NAME_CHARS = 100


class Table(Protocol):
    """A table that can be read repeatedly; a batch has the requested columns, in their order.

    Raises TableError if it is damaged.
    """

    format: TableFormat
    schema: pa.Schema

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Read all rows from the first one on."""


def open_table(file: BinaryFile) -> Table:
    """Return the table in an open file, by its first bytes; raises TableError for other files."""
    with _sentences("table"):
        return _open_table(file)


def _open_table(file: BinaryFile) -> Table:
    file.seek(0)
    head = file.read(HEAD_BYTES)
    if not head:
        raise TableError("The table is empty: it does not even have column names.")
    if head.startswith(PARQUET):
        table: Table = ParquetTable(file)
    elif head.startswith((ARROW_FILE, ARROW_STREAM)):
        table = ArrowTable(file, is_stream=head.startswith(ARROW_STREAM))
    else:
        table = _text_table(file, head)
    check_names(table.schema.names)
    return table


def _text_table(file: BinaryFile, head: bytes) -> Table:
    unpack, head = detect_compression(head)
    text = head.removeprefix(BOM).lstrip(JSON_WHITE_SPACE)
    if is_array_of_objects(text):
        return JsonTable(file, lambda each: array_lines(unpack(each)), unit="element")
    if (mistake := mistake_of_lines(text.split(b"\n", 1)[0].rstrip())) is not None:
        raise TableError(mistake)
    return JsonTable(file, unpack) if text.startswith(b"{") else CsvTable(file, unpack, head)


class ParquetTable:
    """A Parquet file; the first rows and the dictionaries of a row group determine its batch size.

    A dictionary's text may be in any number of rows, which take no memory until they are read.
    """

    format: TableFormat = "parquet"

    def __init__(self, file: BinaryFile) -> None:
        self._bytes = file
        with _sentences("Parquet"):
            self._chunks = read_chunks(file)
            self._file = pq.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER_BYTES)
            self.schema = self._file.schema_arrow
            leaves = map(self._file.schema.column, range(len(self._file.schema)))
            texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
            metadata = self._file.metadata
            self._dictionaries = pq.ParquetFile(
                file,
                read_dictionary=texts,
                metadata=metadata,
                pre_buffer=False,
                buffer_size=_BUFFER_BYTES,
            )

    @property
    def num_rows(self) -> int:
        """Number of rows, from the file's metadata."""
        return int(self._file.metadata.num_rows)

    def group_of(self, row: int) -> tuple[int, int]:
        """Return the row group of a row and its first row, both counted from 0."""
        first = 0
        for group in range(self._file.num_row_groups):
            end = first + self._file.metadata.row_group(group).num_rows
            if row < end:
                return group, first
            first = end
        return self._file.num_row_groups, first

    def batches(self, columns: Sequence[str], *, first_group: int = 0) -> Iterator[pa.RecordBatch]:
        """Read the row groups one after another."""
        number, names = 1, list(columns)
        with _sentences("Parquet", lambda: number):
            for group in range(first_group, self._file.num_row_groups):
                num_rows = self._probed_rows(group, columns, number)
                for batch in self._file.iter_batches(num_rows, [group], columns=names):
                    for part in row_slices(batch.select(names), number):
                        yield part
                        number += part.num_rows

    def _chunks_of(self, group: int) -> Sequence[Chunk]:
        """Return the chunks of a row group, none if they are unknown."""
        return self._chunks[group] if group < len(self._chunks) else ()

    def _probed_rows(self, group: int, columns: Sequence[str], first_row: int) -> int:
        """Return the number of rows for a batch of a good size, within a bound."""
        num_rows, names = _MAX_BATCH_ROWS, list(columns)
        chunks = self._chunks_of(group)
        rows_of_group = self._file.metadata.row_group(group).num_rows
        has_long_pages = check_chunks(self._bytes, chunks, rows_of_group, names) > 0
        num_probed = probe_rows(chunks, rows_of_group, 1 if has_long_pages else _PROBED_ROWS)
        for batch in self._dictionaries.iter_batches(num_probed, [group], columns=names):
            parts = [part.num_rows for part in row_slices(batch, first_row)]
            num_rows = _bounded_rows(batch)
            if num_probed < _PROBED_ROWS or len(parts) > 1:  # otherwise the probe gives no bound
                num_rows = min([num_rows, *parts])
            break
        for batch in self._file.iter_batches(min(num_rows, num_probed), [group], columns=names):
            size: int = batch.nbytes // max(1, batch.num_rows)
            return max(1, min(num_rows, _BATCH_BYTES // max(1, size)))
        return num_rows


class ArrowTable:
    """An Arrow IPC file or stream (Feather), read batch by batch as it was written."""

    format: TableFormat = "arrow"

    def __init__(self, file: BinaryFile, *, is_stream: bool) -> None:
        self._file = file
        self._is_stream = is_stream
        with _sentences("Arrow"):
            check_batches(file, is_stream=is_stream)
            self.schema = self._open().schema

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Read the batches one after another, in slices."""
        number = 1
        with _sentences("Arrow", lambda: number):
            for whole in self._read(self._open()):
                batch = whole.select(list(columns))
                batch.validate(full=True)
                for part in row_slices(batch, number):
                    yield part
                    number += part.num_rows

    def _read(self, reader: Any) -> Iterator[pa.RecordBatch]:
        if self._is_stream:
            return iter(reader)
        return (reader.get_batch(index) for index in range(reader.num_record_batches))

    def _open(self) -> Any:
        self._file.seek(0)
        return ipc.open_stream(self._file) if self._is_stream else ipc.open_file(self._file)


class ScannedTable:
    """A table that another library reads through a function that scans columns.

    Extension types are read as their storage types. Metadata is dropped, because that of `datasets`
    lists the columns, and is wrong for a table with more of them.
    """

    format: TableFormat = "parquet"

    def __init__(
        self, kind: str, schema: pa.Schema, scan: Callable[[list[str]], Iterable[pa.RecordBatch]]
    ) -> None:
        self._kind = kind
        self._scan = scan
        fields = [pa.field(field.name, _stored(field.type), field.nullable) for field in schema]
        self.schema = pa.schema(fields)
        check_names(self.schema.names)

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Scan the columns, in slices."""
        number, names = 1, list(columns)
        schema = pa.schema([self.schema.field(name) for name in names])
        with _sentences(self._kind, lambda: number, files_are_its_own=True):
            for whole in self._scan(names):
                arrays = [_storage_of(whole.column(name)) for name in names]
                batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
                size = batch.nbytes // max(1, batch.num_rows)
                num_rows = min(_bounded_rows(batch), max(1, _BATCH_BYTES // max(1, size)))
                for start in range(0, batch.num_rows, num_rows):
                    yield batch.slice(start, num_rows)
                    number += min(num_rows, batch.num_rows - start)


def read_rows(table: Table, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Read the columns of all rows; without any column, read one, because batches need rows."""
    return table.batches(columns or table.schema.names[:1])


def rendered(
    template: RequestTemplate, batches: Iterable[pa.RecordBatch]
) -> Iterator[tuple[int, Iterator[bytes]]]:
    """Yield the number of rows of each batch, and their lines, numbered consecutively."""
    first_number = 1
    for batch in batches:
        with _sentences("table", partial(int, first_number)):
            cells = {name: cells_of(batch.column(name)) for name in template.columns}
        yield batch.num_rows, template.lines(cells, batch.num_rows, first_number)
        first_number += batch.num_rows


def _bounded_rows(batch: pa.RecordBatch) -> int:
    """Return the number of rows for which the texts of its dictionaries stay within a bound."""
    longest = max(map(_longest_text, batch.columns), default=0)
    return max(1, min(_MAX_BATCH_ROWS, _MAX_BATCH_BYTES // max(1, longest)))


def _longest_text(column: pa.Array) -> int:
    """Return the bytes of the longest text in the dictionaries of a column."""
    kind = column.type
    if pa.types.is_struct(kind):
        return max(map(_longest_text, column.flatten()), default=0)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        return _longest_text(column.values)
    if not pa.types.is_dictionary(kind) or not _is_text(kind.value_type):
        return 0
    return int(compute.max(compute.binary_length(column.dictionary)).as_py() or 0)


def _is_text(kind: pa.DataType) -> bool:
    return kind in {pa.string(), pa.large_string(), pa.binary(), pa.large_binary()}


def _stored(kind: pa.DataType) -> pa.DataType:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _storage_of(column: pa.Array) -> pa.Array:
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def check_names(names: Sequence[str]) -> None:
    """Raise TableError if two columns have the same name."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        named = ", ".join(f"`{name[:_MAX_NAME_CHARS]}`" for name in repeated[:_MAX_NAMED])
        raise TableError(f"The table has more than one column named {named}: rename them.")


@contextmanager
def _sentences(
    kind: str, row: Callable[[], int] | None = None, *, files_are_its_own: bool = False
) -> Iterator[None]:
    """Raise the errors of a damaged or hostile table as TableError, with the first unread row."""
    try:
        yield
    except (pa.ArrowException, OSError, *RAISED_BY_INPUT) as exc:
        is_of_disk = not isinstance(exc, pa.ArrowException) and getattr(exc, "errno", None)
        if is_of_disk and not files_are_its_own:
            raise  # an error of the disk, or the input has changed
        reason = reason_of(exc)
        where = "" if row is None else f", at row {row():,} or after it"
        form = "The table" if kind == "table" else f"The {kind} table"
        if isinstance(exc, MemoryError):
            raise TableError(f"{form} needs more memory than is available{where}.") from exc
        raise TableError(f"{form} is damaged or truncated{where}: {reason}.") from exc
