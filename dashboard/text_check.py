"""Check of a text: requests as JSON, or a table as CSV, TSV or JSON."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from tidemill.batch.file.formats import FileFormat, as_requests, gunzip
from tidemill.batch.file.json_array import elements_as_lines
from tidemill.batch.file.lines import BOM, JSON_WHITE_SPACE, read_lines
from tidemill.batch.table.errors import TableError
from tidemill.batch.table.recipe import TableFormat
from tidemill.batch.table.text_rows import CsvRows, json_row
from tidemill.protocol.validation import printable

from .checked_file import TABLE_KINDS, CheckOptions, FileCheck, FileStart, table_check, times
from .line_check import check_lines
from .recipe_check import check_recipe

_TEXT_BYTES: Final = 2**20
_PACKED_PIECE: Final = 2**12
_GZIP: Final = b"\x1f\x8b"
_CUT: Final = "unexpected end of data"  # the csv module, in a quoted cell


@dataclass(frozen=True, slots=True)
class TextStart:
    """Decompressed text at the start of a file; `num_bytes` is the estimated size of all of it."""

    data: bytes
    num_bytes: float
    is_whole: bool
    is_gzip: bool

    @classmethod
    def of(cls, start: FileStart) -> TextStart:
        """Return the text of a file; raises FormatError for damaged gzip data."""
        if not start.head.startswith(_GZIP):
            return cls(start.head, start.num_bytes, start.is_whole, is_gzip=False)
        num_packed = 0

        def packed() -> Iterator[bytes]:
            nonlocal num_packed
            for place in range(0, len(start.head), _PACKED_PIECE):
                piece = start.head[place : place + _PACKED_PIECE]
                num_packed += len(piece)
                yield piece

        data = b""
        for piece in gunzip(packed(), is_whole=start.is_whole):
            data += piece
            if len(data) >= _TEXT_BYTES:
                break
        is_whole = start.is_whole and len(data) < _TEXT_BYTES
        ratio = len(data) / max(1, num_packed)
        return cls(data, len(data) if is_whole else start.num_bytes * ratio, is_whole, is_gzip=True)

    def lines(self, *, is_array: bool) -> bytes:
        """Return the complete lines, or elements as lines; raises FormatError."""
        data = self.data
        if is_array:
            elements = elements_as_lines((data,))
            data = b"".join(elements) if self.is_whole else next(elements)
        return data if self.is_whole else data[: data.rfind(b"\n") + 1]

    def num_rows(self, num_read: int, num_read_bytes: int) -> int | None:
        """Return the number of rows in all, by those read and their bytes."""
        if self.is_whole:
            return num_read
        return round(num_read * self.num_bytes / num_read_bytes) if num_read else None


def check_requests(form: FileFormat, text: TextStart, options: CheckOptions) -> FileCheck:
    """Return the check of requests."""
    lines = text.lines(is_array=form.is_array)
    raw = read_lines(io.BytesIO(b"".join(as_requests(form, iter((lines,))))))
    check = FileCheck(
        kind=f"{'JSON array' if form.is_array else 'JSONL'} of {form.contents}",
        cut="array" if form.is_array else "lines",
        unit=form.unit,
    )
    checked = check_lines(check, raw, options, mistake=form.suspicion, is_whole=text.is_whole)
    if not checked.num_read and not text.is_whole:
        words = f"The first {form.unit} is too long to be checked here; the upload checks it."
        return replace(checked, notes=(words,), errors=(), num_errors=0, cut="", expected=None)
    return _extrapolated(checked, text, checked.num_read, len(lines))


def _extrapolated(
    check: FileCheck, text: TextStart, num_read: int, num_read_bytes: int
) -> FileCheck:
    num_rows = text.num_rows(num_read, num_read_bytes)
    expected = check.expected
    if expected is not None and num_rows is not None:
        expected = times(expected, num_rows / max(1, check.num_read))
    return replace(check, num_rows=num_rows, is_exact=text.is_whole, expected=expected)


def check_text_table(form: TableFormat, text: TextStart, options: CheckOptions) -> FileCheck:
    """Return the check of a CSV, TSV, or JSON table."""
    cells: list[Sequence[Any]]
    data = text.data.removeprefix(BOM).lstrip(JSON_WHITE_SPACE)
    if form == "jsonl":
        is_array = data.startswith(b"[")
        data = text.lines(is_array=is_array)
        unit = "Element" if is_array else "Line"
        rows = [
            json_row(raw, f"{unit} {raw.number:,} of the table")
            for raw in read_lines(io.BytesIO(data))
        ]
        names = [*dict.fromkeys(name for row in rows for name in row)]
        cells = [[row.get(name) for row in rows] for name in names]
        num_rows, cut = len(rows), "array" if is_array else "lines"
    else:
        data = text.lines(is_array=False)
        read = CsvRows(io.BytesIO(data), _rewound, data)
        names, found, num_read_bytes = read.names, [], 0
        try:
            for row in read.rows():
                found.append(row)
                num_read_bytes += read.num_bytes
        except TableError as exc:
            if text.is_whole or _CUT not in str(exc):
                raise
        cells = [[row[place] or None for row in found] for place in range(len(names))]
        num_rows, cut, form = len(found), "csv", read.format
        data = data[:num_read_bytes]
    if names and (repeated := _repeated(names)) is not None:
        raise TableError(f"The table has more than one column named `{repeated}`: rename them.")
    check = table_check(FileCheck(kind=TABLE_KINDS[form], cut=cut), names)
    if not num_rows:
        if text.is_whole:
            raise TableError("The table has no rows.")
        words = "The first row is too long to be checked here; the upload checks it."
        return replace(check, notes=(words,), needs_recipe=options.recipe is None, cut="")
    if options.recipe is None:
        check = replace(check, needs_recipe=True)
    else:
        columns = dict(zip(names, cells, strict=True))
        check = check_recipe(check, options, columns, num_rows, is_whole=text.is_whole)
    return _extrapolated(check, text, num_rows, max(1, len(data)))


def _rewound(file: Any) -> Any:
    file.seek(0)
    return file


def _repeated(names: Sequence[str]) -> str | None:
    name, count = Counter(names).most_common(1)[0]
    return printable(name, 100) if count > 1 else None
