"""Rows of a run or a batch in the form of their input's vendor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pydantic_core import from_json, to_json

from tidemill.batch.file.formats import open_lines
from tidemill.batch.file.lines import (
    BOM,
    FormatError,
    LineError,
    RawLine,
    Vendor,
    parse_line,
    read_lines,
)
from tidemill.batch.file.rows import escape_separators, row_id_of
from tidemill.batch.file.vendor_lines import request_line
from tidemill.batch.file.vendor_rows import FORMS, vendor_row

from ..console.errors import BadInput
from ..files.new_file import NewFile
from ..files.request_lines import detect_source, unreadable
from ..files.row_file import RowFile, open_rows
from ..files.source import Source

_END: Final[tuple[int, Mapping[str, Any] | None]] = (0, None)


def convert_rows(source: Source, names: Sequence[str], out: NewFile, tmp_dir: Path | None) -> int:
    """Write the row of each line of an input in its vendor's form, and return their number.

    Each of the files `names` has its rows in the order of the input. Raises BadInput for an input
    in OpenAI's form, and unless the rows are exactly those of its lines.
    """
    form = detect_source(source)
    vendor = form.vendor
    if vendor not in FORMS:
        raise BadInput(
            f"{source.name} contains {form.contents}, whose rows have OpenAI's form: only rows of "
            "Anthropic, Bedrock and Gemini requests are converted"
        )
    num_rows = 0
    with ExitStack() as stack:
        files = [stack.enter_context(open_rows(name, tmp_dir=tmp_dir)) for name in names]
        cursors = [_Cursor(file) for file in files]
        try:
            for raw in read_lines(open_lines(replace(form, vendor=None), source.file)):
                line = RawLine(raw.number, request_line(vendor, raw))
                custom_id = _id_of(line)
                at_line = [each for each in cursors if each.is_at_line(line)]
                found = at_line or [each for each in cursors if each.is_at_id(custom_id)]
                place = f"{form.unit} {raw.number:,} of {source.name} ({custom_id})"
                if not found:
                    raise BadInput(
                        f"{place} has no row in {' or '.join(names)}, in the order of the input: "
                        "finish the run, or give the errors file too"
                    )
                if len(found) > 1:
                    raise BadInput(
                        f"{place} has a row in each of {' and '.join(names)}: give the rows of one "
                        "run, or make the IDs unique and run again"
                    )
                row = found[0].pop_as(vendor, raw)
                out.write(escape_separators(to_json(row, inf_nan_mode="null")) + b"\n")
                num_rows += 1
        except FormatError as exc:
            raise unreadable(source, exc) from exc
    for cursor, name in zip(cursors, names, strict=True):
        if cursor.row is not None:
            raise BadInput(
                f"{name} has a row ({cursor.row.get('custom_id')}) of no {form.unit} of "
                f"{source.name}: give the input of these rows"
            )
    return num_rows


class _Cursor:
    """The next row of a file."""

    def __init__(self, file: RowFile) -> None:
        self._name = file.name
        self._rows = file.fields()
        self._number, self.row = next(self._rows, _END)

    def is_at_line(self, line: RawLine) -> bool:
        """Return whether the next row has the ID that a run gives the row of this request."""
        return self.row is not None and self.row.get("id") == row_id_of(line.digest)

    def is_at_id(self, custom_id: str | None) -> bool:
        """Return whether the next row has this custom ID."""
        return self.row is not None and self.row.get("custom_id") == custom_id

    def pop_as(self, vendor: Vendor, raw: RawLine) -> dict[str, Any]:
        """Return the next row as that of a vendor's line, and move to the one after it."""
        assert self.row is not None
        try:
            row = vendor_row(vendor, _fields_of(raw), self.row)
        except ValueError as exc:
            raise BadInput(
                f"row {self._number:,} of {self._name} {exc}: give the rows of a run of this input"
            ) from exc
        self._number, self.row = next(self._rows, _END)
        return row


def _id_of(raw: RawLine) -> str | None:
    try:
        return parse_line(raw).custom_id
    except LineError as exc:
        return exc.custom_id


def _fields_of(raw: RawLine) -> dict[str, Any]:
    try:
        fields = from_json(raw.data.removeprefix(BOM))
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}
