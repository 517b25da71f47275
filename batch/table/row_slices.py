"""Row slices: parts of a record batch whose values need a bounded amount of memory.

An Arrow batch may contain a single text that a million rows refer to, or a list of a billion
values in no bytes. Sizes are computed from lengths, without the values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa
from pyarrow import compute, types

from .errors import TableError

MAX_SLICE_BYTES: Final = 2**26
MAX_ROW_BYTES: Final = 2**27
_MAX_SLICE_ROWS: Final = 2**13
_VALUE_BYTES: Final = 32
_VIEW_BYTES: Final = 16


def row_slices(batch: pa.RecordBatch, first_row: int) -> Iterator[pa.RecordBatch]:
    """Yield a batch in slices of bounded size; raises TableError for a row that is too large."""
    for start in range(0, batch.num_rows, _MAX_SLICE_ROWS):
        yield from _halves(batch.slice(start, _MAX_SLICE_ROWS), first_row + start)


def _halves(batch: pa.RecordBatch, first_row: int) -> Iterator[pa.RecordBatch]:
    size = sum(map(_num_bytes, batch.columns))
    if size <= MAX_SLICE_BYTES or (batch.num_rows == 1 and size <= MAX_ROW_BYTES):
        yield batch
        return
    if batch.num_rows == 1:
        raise TableError(
            f"Row {first_row:,} of the table needs more than {MAX_ROW_BYTES:,} bytes: shorten it."
        )
    half = batch.num_rows // 2
    yield from _halves(batch.slice(0, half), first_row)
    yield from _halves(batch.slice(half), first_row + half)


def _num_bytes(column: pa.Array) -> int:
    """Return the bytes of a column's values, counted once per row."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return _num_bytes(column.storage)
    if types.is_struct(kind):
        return _VALUE_BYTES * len(column) + sum(map(_num_bytes, column.flatten()))
    if types.is_union(kind):  # any number of its rows may share a value
        fields = (column.field(place) for place in range(kind.num_fields))
        return len(column) * (_VALUE_BYTES + max(map(_longest, fields), default=0))
    if types.is_list_view(kind) or types.is_large_list_view(kind) or types.is_fixed_size_list(kind):
        return _num_bytes_of_lists(column)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        return _VALUE_BYTES * len(column) + _num_bytes(_items(column))
    if types.is_dictionary(kind):
        lengths = _text_lengths(column.dictionary)
        used = 0 if lengths is None else compute.sum(lengths.take(column.indices)).as_py()
        return _VALUE_BYTES * len(column) + int(used or 0)
    if types.is_run_end_encoded(kind):
        lengths = _text_lengths(column.values)
        longest = 0 if lengths is None else compute.max(lengths).as_py()
        return len(column) * (_VALUE_BYTES + int(longest or 0))
    if types.is_string_view(kind) or types.is_binary_view(kind):
        lengths = _text_lengths(column)
        return _VALUE_BYTES * len(column) + int(compute.sum(lengths).as_py() or 0)
    return _VALUE_BYTES * len(column) + int(column.nbytes)


def _num_bytes_of_lists(column: pa.Array) -> int:
    """Return the bytes of lists that may share their values, which `flatten` would copy."""
    num_values = int(compute.sum(compute.list_value_length(column)).as_py() or 0)
    size = _VALUE_BYTES * (len(column) + num_values)
    return size if size > MAX_ROW_BYTES else size + _num_bytes(column.flatten())


def _longest(column: pa.Array) -> int:
    """Return the maximum bytes of a value, or the sum if they are nested."""
    lengths = _text_lengths(column)
    if lengths is not None:
        return int(compute.max(lengths).as_py() or 0)
    return _num_bytes(column) if types.is_nested(column.type) else 0


def _items(column: pa.Array) -> pa.Array:
    """Return the values of lists, or the entries of maps."""
    if not types.is_map(column.type):
        return column.flatten()
    first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
    keys, items = column.keys.slice(first, last - first), column.items.slice(first, last - first)
    return pa.StructArray.from_arrays([keys, items], ["key", "value"])


def _text_lengths(column: pa.Array) -> pa.Array | None:
    """Return the bytes of each text; None for values of another type."""
    kind = column.type
    if types.is_string_view(kind) or types.is_binary_view(kind):
        views = memoryview(column.buffers()[1])[column.offset * _VIEW_BYTES :].cast("i")
        found = pa.array(views[: len(column) * 4 : 4].tolist(), pa.int64())
        return compute.if_else(column.is_valid(), found, 0)
    if types.is_fixed_size_binary(kind):
        return pa.repeat(pa.scalar(kind.byte_width, pa.int64()), len(column))
    is_text = (
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
    )
    return compute.binary_length(column).cast(pa.int64()) if is_text else None
