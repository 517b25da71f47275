"""Cells: the values of Arrow columns in templates, and in CSV and JSON.

A cell is a text, a number, a boolean, a decimal, a list, a struct or null, whatever its type.
Dates and times are texts, durations and intervals ISO 8601 texts, UUIDs texts, and maps lists of
pairs; dictionaries and runs are read as their values.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple
from uuid import UUID

import pyarrow as pa
from pyarrow import compute, types

from .no_text import NoText

UNDECODABLE: Final = "which is not supported: write its values without this encoding"
"""Reason for a dictionary, or run-end encoding, of nested values."""
_UNKNOWN_ZONE: Final = "and this machine does not know its time zone: convert it to UTC"

_DIGITS: Final = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_DAY_SECONDS: Final = 86_400
_ZEROS: Final = r"\.0+(Z|[+-]\d{4})?$"
_FAR_TIME: Final = "<value out of range: "
"""Start of the text that Arrow prints for a time before year -32767 or after year 32767."""
_LAST_SECOND: Final = 971_890_963_199
"""Last second of the year 32767, the last one that Arrow prints."""
# pyarrow has no Python values for these.
_UNREADABLE_INTERVALS: Final = {pa.lib.Type_INTERVAL_MONTHS, pa.lib.Type_INTERVAL_DAY_TIME}
_DECIMAL128_DIGITS: Final = 38
_DECIMAL256_DIGITS: Final = 76


class TypeProblem(NamedTuple):
    """An unsupported type inside a column's type; `reason` follows the type in messages."""

    kind: pa.DataType
    reason: str


class _Reading(NamedTuple):
    """Values for the cells that have no text."""

    of_bytes: Callable[[bytes], Any]
    of_broken_text: Callable[[bytes], Any]
    of_far_time: Callable[[str], Any]
    strips_zeros: bool


_BYTES: Final = NoText("bytes", "write the column as text")
_NOT_UTF8: Final = NoText("not UTF-8")
_FOR_TEMPLATES: Final = _Reading(
    lambda _: _BYTES,
    lambda _: _NOT_UTF8,
    lambda text: NoText(f"a date or time out of range ({text.removeprefix(_FAR_TIME)[:-1]})"),
    strips_zeros=True,
)
_FOR_OUTPUT: Final = _Reading(
    lambda data: b64encode(data).decode(),
    lambda data: data.decode("utf-8", "replace"),
    lambda text: text,
    strips_zeros=False,
)


def cells_of(column: pa.Array) -> list[Any]:
    """Return the cells for templates; those that cannot be printed are `NoText`."""
    return _read(column, _FOR_TEMPLATES)


def output_cells(column: pa.Array) -> list[Any]:
    """Return the cells for CSV and JSON: bytes as base64, invalid text with U+FFFD."""
    return _read(column, _FOR_OUTPUT)


def problem_of(kind: pa.DataType) -> TypeProblem | None:
    """Return the type, of a column or inside it, with unreadable values; None without one."""
    if isinstance(kind, pa.BaseExtensionType):
        return problem_of(kind.storage_type)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        if not is_decodable(kind):
            return TypeProblem(kind, UNDECODABLE)
        return problem_of(kind.value_type)
    if types.is_timestamp(kind) and kind.tz is not None:
        try:
            pa.array([0], kind).cast(pa.string())
        except pa.ArrowException:
            return TypeProblem(kind, _UNKNOWN_ZONE)
    if types.is_struct(kind) and len({*(names := [field.name for field in kind])}) < len(names):
        return TypeProblem(kind, "with two fields of the same name: rename one of them")
    if types.is_nested(kind):
        return next(filter(None, map(problem_of, children_of(kind))), None)
    if _is_flat(kind):
        return None
    return TypeProblem(kind, "which is not supported: write it as text")


def children_of(kind: pa.DataType) -> list[pa.DataType]:
    """Return the types inside a nested type."""
    if types.is_map(kind):
        return [kind.key_type, kind.item_type]
    return [kind.field(place).type for place in range(kind.num_fields)]


def is_interval(kind: pa.DataType) -> bool:
    """Say whether a type is one of Arrow's three interval types."""
    return kind.id in {*_UNREADABLE_INTERVALS, pa.lib.Type_INTERVAL_MONTH_DAY_NANO}


def is_decodable(kind: pa.DataType) -> bool:
    """Say whether the values of a dictionary or of runs can be read without their encoding."""
    if types.is_run_end_encoded(kind):
        return _is_flat(kind.value_type) and not _is_view(kind.value_type)
    return _is_flat(kind.value_type)


def decoded_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of `decoded`'s result."""
    return without_view(kind.value_type)


def without_view(kind: pa.DataType) -> pa.DataType:
    """Return the type of the same values that more Arrow functions support."""
    if types.is_string_view(kind):
        return pa.string()
    return pa.binary() if types.is_binary_view(kind) else kind


def decoded(column: pa.Array) -> pa.Array:
    """Return the values of a dictionary or run-end encoded column."""
    if types.is_run_end_encoded(column.type):
        return compute.run_end_decode(column)
    return column.dictionary.cast(decoded_type(column.type)).take(column.indices)


def plain_decimal(kind: pa.DataType) -> pa.DataType | None:
    """Return the decimal type without a negative scale; None if it has too many digits."""
    digits = kind.precision - min(0, kind.scale)
    if digits > _DECIMAL256_DIGITS:
        return None
    make = pa.decimal128 if digits <= _DECIMAL128_DIGITS else pa.decimal256
    return make(digits, max(0, kind.scale))


def lists_of(column: pa.Array) -> tuple[list[int | None], pa.Array]:
    """Return the lengths of lists, None for null, and the values of all lists."""
    return compute.list_value_length(column).to_pylist(), column.flatten()


def pairs_of(column: pa.Array) -> tuple[list[int | None], pa.Array, pa.Array]:
    """Return the lengths of maps, None for null, and the keys and items of all maps."""
    ends = column.offsets.to_pylist()
    first, size = ends[0], ends[-1] - ends[0]
    lengths: list[int | None] = [end - start for start, end in pairwise(ends)]
    if column.null_count:
        is_valid = column.is_valid().to_pylist()
        lengths = [size if valid else None for size, valid in zip(lengths, is_valid, strict=True)]
    return lengths, column.keys.slice(first, size), column.items.slice(first, size)


def _read(column: pa.Array, how: _Reading) -> list[Any]:
    kind = column.type
    if _is_simple(kind) and (found := _as_py(column)) is not None:
        return found
    if _is_text(kind):
        return [_text(cell, how) for cell in column]
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _read(decoded(column), how)
    if types.is_nested(kind):  # from pyarrow 26 also of runs
        return _nested(column, how)
    if isinstance(kind, pa.BaseExtensionType):
        return _extensions(column, how)
    if types.is_temporal(kind):
        return _temporal(column, how)
    if types.is_decimal(kind) and kind.scale < 0:
        column = column.cast(plain_decimal(kind))
    values: list[Any] = column.to_pylist()
    if _is_bytes(kind):
        return [None if value is None else how.of_bytes(value) for value in values]
    return values


def _as_py(column: pa.Array) -> list[Any] | None:
    """Return the values from pyarrow; None if a text is not UTF-8."""
    try:
        found: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        return None
    return found


def _text(cell: pa.Scalar, how: _Reading) -> Any:
    try:
        return cell.as_py()
    except UnicodeDecodeError:
        return how.of_broken_text(cell.as_buffer().to_pybytes())


def _nested(column: pa.Array, how: _Reading) -> list[Any]:
    kind = column.type
    if types.is_struct(kind):
        return _structs(column, how)
    if types.is_union(kind):
        return _union(column, how)
    if types.is_map(kind):
        lengths, keys, items = pairs_of(column)
        pairs = zip(_read(keys, how), _read(items, how), strict=True)
        values: list[Any] = [list(pair) for pair in pairs]
    else:
        lengths, flat = lists_of(column)
        values = _read(flat, how)
    ends = accumulate((length or 0 for length in lengths), initial=0)
    return [
        None if length is None else values[start : start + length]
        for start, length in zip(ends, lengths, strict=False)
    ]


def _structs(column: pa.Array, how: _Reading) -> list[Any]:
    names = [field.name for field in column.type]
    if names:
        fields = [_read(child, how) for child in column.flatten()]
        rows: list[Any] = [dict(zip(names, row, strict=True)) for row in zip(*fields, strict=True)]
    else:
        rows = [{} for _ in range(len(column))]
    if column.null_count:
        is_valid = column.is_valid().to_pylist()
        rows = [row if valid else None for row, valid in zip(rows, is_valid, strict=True)]
    return rows


def _union(column: pa.Array, how: _Reading) -> list[Any]:
    if not len(column):
        return []
    # From the buffers: `type_codes` and `offsets` belong to the column before it was sliced.
    rows = slice(column.offset, column.offset + len(column))
    buffers = column.buffers()
    codes = memoryview(buffers[1]).cast("b")[rows].tolist()
    places: Sequence[int] = range(len(codes))
    if column.type.mode == "dense":
        places = memoryview(buffers[2]).cast("i")[rows].tolist()
    children = dict(zip(column.type.type_codes, range(column.type.num_fields), strict=True))
    return [
        _read(column.field(children[code]).slice(place, 1), how)[0]
        for code, place in zip(codes, places, strict=True)
    ]


def _extensions(column: pa.Array, how: _Reading) -> list[Any]:
    name, storage = column.type.extension_name, column.storage
    if name == "arrow.uuid":
        return [None if data is None else str(UUID(bytes=data)) for data in storage.to_pylist()]
    if name == "arrow.bool8":
        return [None if number is None else number != 0 for number in storage.to_pylist()]
    return _read(storage, how)


def _temporal(column: pa.Array, how: _Reading) -> list[Any]:
    kind = column.type
    if types.is_duration(kind):
        digits, counts = _DIGITS[kind.unit], column.cast(pa.int64()).to_pylist()
        return [None if count is None else _duration(count, digits) for count in counts]
    if is_interval(kind):
        return [None if each is None else _interval(*each) for each in column.to_pylist()]
    return _times(column, how)


def _times(column: pa.Array, how: _Reading) -> list[Any]:
    """Return dates and times as text; Arrow prints distant ones with a time zone incorrectly."""
    texts, kind = column.cast(pa.string()), column.type
    if types.is_timestamp(kind) and kind.tz is not None:
        ends = compute.min_max(column.cast(pa.int64())).as_py()
        last = _LAST_SECOND * 10 ** _DIGITS[kind.unit]
        if max(abs(ends["min"] or 0), abs(ends["max"] or 0)) > last:
            plain = column.cast(pa.timestamp(kind.unit)).cast(pa.string())
            texts = compute.if_else(compute.starts_with(plain, _FAR_TIME), plain, texts)
    if how.strips_zeros:
        texts = compute.replace_substring_regex(texts, _ZEROS, r"\1")
    found: list[Any] = texts.to_pylist()
    if compute.any(compute.starts_with(texts, _FAR_TIME)).as_py():
        return [how.of_far_time(text) if text and text[0] == "<" else text for text in found]
    return found


def _duration(count: int, digits: int) -> str:
    """Return a duration in ISO 8601, such as `P1DT2H3M4.5S`."""
    seconds, fraction = divmod(abs(count), 10**digits)
    days, seconds = divmod(seconds, _DAY_SECONDS)
    hours, seconds = divmod(seconds, 3600)
    minutes, seconds = divmod(seconds, 60)
    text = f"{days}D" if days else ""
    if hours or minutes or seconds or fraction or not days:
        parts = ((hours, "H"), (minutes, "M"))
        text += "T" + "".join(f"{number}{unit}" for number, unit in parts if number)
        if seconds or fraction or not (hours or minutes):
            shown = f"{fraction:0{digits}}".rstrip("0") if fraction else ""
            text += f"{seconds}{'.' * bool(shown)}{shown}S"
    return f"{'-' * (count < 0)}P{text}"


def _interval(months: int, days: int, nanoseconds: int) -> str:
    """Return months, days and a time in ISO 8601; each part has its sign."""
    text = "".join(f"{number}{unit}" for number, unit in ((months, "M"), (days, "D")) if number)
    if nanoseconds or not text:
        seconds, fraction = divmod(abs(nanoseconds), 10**9)
        shown = f".{fraction:09}".rstrip("0") if fraction else ""
        text += f"T{'-' * (nanoseconds < 0)}{seconds}{shown}S"
    return f"P{text}"


def _is_flat(kind: pa.DataType) -> bool:
    """Say whether a type has no inner type, and readable values."""
    if types.is_decimal(kind):
        return plain_decimal(kind) is not None
    if kind.id in _UNREADABLE_INTERVALS:
        return False
    return (
        types.is_primitive(kind)  # numbers, booleans, dates, times, durations and intervals
        or types.is_null(kind)
        or _is_text(kind)
        or _is_bytes(kind)
    )


def _is_simple(kind: pa.DataType) -> bool:
    """Say whether pyarrow's values of a type are the cells' values, apart from invalid text."""
    if types.is_struct(kind) or types.is_list(kind) or types.is_large_list(kind):
        return all(map(_is_simple, children_of(kind)))
    if types.is_fixed_size_list(kind):
        return _is_simple(kind.value_type)
    return bool(
        _is_text(kind)
        or types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_boolean(kind)
        or types.is_null(kind)
    )


def _is_text(kind: pa.DataType) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_view(kind: pa.DataType) -> bool:
    return bool(types.is_string_view(kind) or types.is_binary_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_binary_view(kind)
        or types.is_fixed_size_binary(kind)
    )
