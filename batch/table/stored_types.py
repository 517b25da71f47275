"""Stored types: the types of a table's columns in an output format."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import pyarrow as pa
from pyarrow import types

from .cells import (
    UNDECODABLE,
    TypeProblem,
    children_of,
    decoded,
    decoded_type,
    is_decodable,
    is_interval,
    lists_of,
    pairs_of,
    plain_decimal,
    problem_of,
    without_view,
)
from .recipe import TableFormat

_NAMES: Final = {"parquet": "Parquet", "arrow": "Arrow", "csv": "CSV", "tsv": "TSV"}
_OTHER_FORMATS: Final = {"parquet": "`arrow` or `jsonl`", "arrow": "`jsonl`"}
_PARQUET_DICTIONARIES: Final = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


class NotStorable(Exception):
    """A type that an output format does not support."""

    def __init__(self, problem: TypeProblem) -> None:
        super().__init__(problem.reason)
        self.problem = problem


def storage_problem(kind: pa.DataType, form: TableFormat) -> TypeProblem | None:
    """Return the reason why a format does not support a column type; None if it does."""
    if form not in _OTHER_FORMATS:
        return problem_of(kind)
    try:
        stored_type(kind, form)
    except NotStorable as exc:
        return exc.problem
    return None


def stored_type(kind: pa.DataType, form: TableFormat) -> pa.DataType:
    """Return the type that Parquet or Arrow use for a type's values; raises NotStorable."""
    if isinstance(kind, pa.BaseExtensionType):
        plain = stored_type(kind.storage_type, form)
        return kind if plain == kind.storage_type else plain
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _stored_encoding(kind, form)
    if form == "parquet":
        kind = _parquet_type(kind)
    if not types.is_nested(kind):
        return kind
    children = children_of(kind)
    stored = [stored_type(child, form) for child in children]
    if form == "parquet":
        # Parquet's writer does not support these encodings inside another type.
        stored = [
            decoded_type(each) if types.is_dictionary(each) else without_view(each)
            for each in stored
        ]
    if stored == children:
        return kind
    if types.is_union(kind):
        raise _not_storable(kind, form)
    return _with_children(kind, stored)


def as_stored(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a column in the type that `stored_type` returned for it."""
    current = column.type
    if current == kind:
        has_null = types.is_dictionary(kind) and column.dictionary.null_count
        return _encoded_again(column) if has_null else column
    if isinstance(current, pa.BaseExtensionType):
        return as_stored(column.storage, kind)
    if types.is_dictionary(current) or types.is_run_end_encoded(current):
        return as_stored(decoded(column), kind)
    if types.is_struct(kind):
        fields = [
            as_stored(child, field.type)
            for child, field in zip(column.flatten(), kind, strict=True)
        ]
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=column.is_null())
    if types.is_map(kind):
        lengths, keys, items = pairs_of(column)
        keys, items = as_stored(keys, kind.key_type), as_stored(items, kind.item_type)
        return pa.MapArray.from_arrays(_offsets(lengths, pa.int32()), keys, items, type=kind)
    if types.is_list(kind) or types.is_large_list(kind):
        lengths, values = lists_of(column)
        values = as_stored(values, kind.value_type)
        if types.is_large_list(kind):
            offsets = _offsets(lengths, pa.int64())
            return pa.LargeListArray.from_arrays(offsets, values, type=kind)
        return pa.ListArray.from_arrays(_offsets(lengths, pa.int32()), values, type=kind)
    return column.cast(kind)


def _parquet_type(kind: pa.DataType) -> pa.DataType:
    """Return a Parquet type, with supported types inside; raises NotStorable."""
    if types.is_decimal(kind) and kind.scale < 0 and (plain := plain_decimal(kind)) is not None:
        return plain
    if types.is_timestamp(kind) and kind.unit == "s":
        return pa.timestamp("ms", kind.tz)
    is_empty = types.is_struct(kind) and not kind.num_fields
    has_scale = types.is_decimal(kind) and kind.scale < 0
    if types.is_union(kind) or is_interval(kind) or is_empty or has_scale:
        raise _not_storable(kind, "parquet")
    return kind


def _stored_encoding(kind: pa.DataType, form: TableFormat) -> pa.DataType:
    """Return the type of a dictionary, which Parquet supports for texts, or of its values."""
    # An Arrow file has one dictionary per column, but each batch has its own.
    if form == "parquet" and types.is_dictionary(kind) and kind.value_type in _PARQUET_DICTIONARIES:
        return kind
    if not is_decodable(kind):
        raise NotStorable(TypeProblem(kind, UNDECODABLE))
    return stored_type(decoded_type(kind), form)


def _encoded_again(column: pa.Array) -> pa.Array:
    """Return a dictionary column without nulls in its dictionary, which Parquet refuses."""
    again, kind = decoded(column).dictionary_encode(), column.type
    indices = again.indices.cast(kind.index_type)
    return pa.DictionaryArray.from_arrays(indices, again.dictionary, ordered=kind.ordered)


def _with_children(kind: pa.DataType, stored: Sequence[pa.DataType]) -> pa.DataType:
    """Return a nested type with other inner types; lists of any layout become plain lists."""
    if types.is_map(kind):
        return pa.map_(*stored)
    fields = [kind.field(place).with_type(each) for place, each in enumerate(stored)]
    if types.is_struct(kind):
        return pa.struct(fields)
    is_large = types.is_large_list(kind) or types.is_large_list_view(kind)
    return (pa.large_list if is_large else pa.list_)(fields[0])


def _offsets(lengths: Sequence[int | None], kind: pa.DataType) -> pa.Array:
    ends = list(accumulate((length or 0 for length in lengths), initial=0))
    starts: list[Any] = [
        None if length is None else start for start, length in zip(ends, lengths, strict=False)
    ]
    return pa.array([*starts, ends[-1]], kind)


def _not_storable(kind: pa.DataType, form: TableFormat) -> NotStorable:
    ways = f"use {_OTHER_FORMATS[form]} as the output format, or remove the column from `keep`"
    return NotStorable(TypeProblem(kind, f"which {_NAMES[form]} does not support: {ways}"))
