"""Columns of all Arrow types, with nulls and extremes, plain and nested."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

import pyarrow as pa

LEAST = -(2**63)
GREATEST = 2**63 - 1
ZONES = (None, "UTC", "+05:30", "Europe/Berlin", "Mars/Phobos")


class Custom(pa.ExtensionType):
    """An extension type that no code here supports."""

    def __init__(self) -> None:
        super().__init__(pa.int64(), "tests.custom")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, serialized: bytes) -> Custom:
        return cls()


def columns() -> Iterator[pa.Array]:
    """Yield a column of each type, and of each type inside others."""
    plain = [*_numbers(), *_texts(), *_times(), *_lists()]
    for column in [*plain, *_extensions()]:
        yield column
        yield from _nested(column)


def _numbers() -> Iterator[pa.Array]:
    yield pa.nulls(2)
    yield pa.array([True, None])
    for bits in (8, 16, 32, 64):
        top = 2 ** (bits - 1)
        yield pa.array([-top, None, top - 1], getattr(pa, f"int{bits}")())
        yield pa.array([0, None, 2 * top - 1], getattr(pa, f"uint{bits}")())
    for kind in (pa.float16(), pa.float32(), pa.float64()):
        yield pa.array([1.5, None, float("nan"), float("inf")], kind)
    for kind in (pa.decimal32(5, 2), pa.decimal64(9, 2), pa.decimal128(38, 2), pa.decimal256(76)):
        yield pa.array([Decimal(100), None], kind)
    yield pa.array([Decimal(100), None], pa.decimal128(5, -2))
    yield pa.array([Decimal("1e40"), None], pa.decimal256(74, -40))


def _texts() -> Iterator[pa.Array]:
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        yield pa.array(["x", None, ""], kind)
    for kind in (pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(3)):
        yield pa.array([b"\xff>?", None], kind)


def _times() -> Iterator[pa.Array]:
    yield pa.array([1, None, 2**31 - 1, -(2**31)], pa.int32()).cast(pa.date32())
    yield pa.array([86_400_000, None], pa.int64()).cast(pa.date64())
    for unit in ("s", "ms"):
        yield pa.array([1, None], pa.int32()).cast(pa.time32(unit))
    for unit in ("us", "ns"):
        yield pa.array([1, None], pa.int64()).cast(pa.time64(unit))
    for unit in ("s", "ms", "us", "ns"):
        for zone in ZONES:
            # In seconds: later times have too many milliseconds for Parquet.
            last = 900_000_000_000 if unit == "s" else GREATEST
            yield pa.array([1, None, -last, last], pa.int64()).view(pa.timestamp(unit, zone))
        yield pa.array([1, None, LEAST, GREATEST], pa.int64()).view(pa.duration(unit))
    yield pa.array([pa.MonthDayNano([1, -2, 3]), None])


def _lists() -> Iterator[pa.Array]:
    for kind in (
        pa.list_(pa.string()),
        pa.large_list(pa.string()),
        pa.list_view(pa.string()),
        pa.large_list_view(pa.string()),
    ):
        yield pa.array([["x", None], None, ["y", "z"]], kind)
    # Without null: pyarrow cannot read one of a fixed size from Parquet.
    yield pa.array([["x", None], ["y", "z"]], pa.list_(pa.string(), 2))
    yield pa.array([[("a", 1), ("a", None)], None, []], pa.map_(pa.string(), pa.int64()))
    yield pa.array([{"x": 1}, None], pa.struct([("x", pa.int64())]))
    yield pa.array([{}, None], pa.struct([]))
    text = pa.array(["x", None])
    yield pa.StructArray.from_arrays([text, text], ["x", "x"])
    codes, offsets = pa.array([0, 1], pa.int8()), pa.array([0, 1], pa.int32())
    yield pa.UnionArray.from_sparse(codes, [text, pa.array([1, 2])])
    yield pa.UnionArray.from_dense(codes, offsets, [text, pa.array([1, 2])])
    yield pa.array(["x", None, "y"]).dictionary_encode()


def _extensions() -> Iterator[pa.Array]:
    of = pa.ExtensionArray.from_storage
    yield of(pa.uuid(), pa.array([bytes(16), None], pa.binary(16)))
    yield of(pa.json_(), pa.array(["{}", None]))
    yield of(pa.bool8(), pa.array([2, None], pa.int8()))
    yield of(pa.opaque(pa.int64(), "t", "v"), pa.array([1, None]))
    yield of(pa.fixed_shape_tensor(pa.int64(), [2]), pa.array([[1, 2]], pa.list_(pa.int64(), 2)))
    yield of(Custom(), pa.array([1, None]))


def _nested(column: pa.Array) -> Iterator[pa.Array]:
    size = len(column)
    yield pa.ListArray.from_arrays(pa.array([0, None, size], pa.int32()), column)
    yield pa.StructArray.from_arrays([column], ["x"])
    yield pa.MapArray.from_arrays(pa.array([0, size]), pa.array(map(str, range(size))), column)
    yield pa.DictionaryArray.from_arrays(pa.array([0, None, size - 1], pa.int8()), column)
    ends = pa.array(range(1, size + 1), pa.int32())
    yield pa.RunEndEncodedArray.from_arrays(ends, column)
