"""Cells of a few rows of a table, read without Arrow, to show them next to the rows' answers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from ..file.formats import (
    HEAD_BYTES,
    BinaryFile,
    array_lines,
    detect_compression,
    is_array_of_objects,
)
from ..file.lines import BOM, JSON_WHITE_SPACE, read_lines
from .detection import detect_table
from .text_rows import CsvRows, json_row

READ_BYTES: Final = 2**24
"""Decompressed bytes of a table that one call reads at most."""

Row = Mapping[str, Any]


def read_cells(file: BinaryFile, numbers: Collection[int]) -> dict[int, Row]:
    """Return rows of a table by their numbers, from 1 on, as far as they are within the limit.

    Rows of Parquet and Arrow are not read. Raises TableError and FormatError.
    """
    last, found = max(numbers, default=0), {}
    for number, (num_bytes, row) in enumerate(_rows(file), 1):
        if number > last or num_bytes > READ_BYTES:
            break
        if number in numbers:
            found[number] = row
    return found


def _rows(file: BinaryFile) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a text table, each with the bytes read so far."""
    file.seek(0)
    head = file.read(HEAD_BYTES)
    if detect_table(head) not in {"csv", "tsv", "jsonl"}:
        return
    unpack, head = detect_compression(head)
    text, num_bytes = head.removeprefix(BOM).lstrip(JSON_WHITE_SPACE), 0
    if text.startswith((b"{", b"[")):
        stream = unpack(file)
        for raw in read_lines(array_lines(stream) if is_array_of_objects(text) else stream):
            num_bytes += len(raw.data)
            yield num_bytes, json_row(raw, f"Row {raw.number:,} of the table")
        return
    table = CsvRows(file, unpack, head)
    for cells in table.rows():
        num_bytes += table.num_bytes
        yield num_bytes, dict(zip(table.names, cells, strict=True))
