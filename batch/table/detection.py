"""Table detection by first bytes, without a table reader."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ..file.formats import (
    begins_with_request,
    detect_compression,
    is_array_of_objects,
    mistake_of_lines,
)
from ..file.json_array import elements_as_lines
from ..file.lines import BOM, JSON_WHITE_SPACE, FormatError

if TYPE_CHECKING:
    from .recipe import TableFormat

PARQUET: Final = b"PAR1"
ARROW_FILE: Final = b"ARROW1"
ARROW_STREAM: Final = b"\xff\xff\xff\xff"
DELIMITERS: Final = (",", "\t", ";")


def detect_table(head: bytes) -> TableFormat | None:
    """Return the format of a table that begins with `head`; None for a file of requests."""
    if head.startswith(PARQUET):
        return "parquet"
    if head.startswith((ARROW_FILE, ARROW_STREAM)):
        return "arrow"
    try:
        text = detect_compression(head)[1].removeprefix(BOM).lstrip(JSON_WHITE_SPACE)
    except FormatError:
        return None
    if is_array_of_objects(text):
        with suppress(FormatError):
            text = next(elements_as_lines((text,)))
    first_line = text.split(b"\n", 1)[0]
    is_empty = not first_line or b"\0" in first_line
    if is_empty or first_line.startswith(b"[") or mistake_of_lines(first_line.rstrip()):
        return None
    if first_line.startswith(b"{"):
        return None if begins_with_request(first_line) else "jsonl"
    return "tsv" if delimiter_of(first_line.decode("utf-8", "replace")) == "\t" else "csv"


def delimiter_of(header: str) -> str:
    """Return the delimiter of a CSV: the most frequent one in its header."""
    return max(DELIMITERS, key=header.count)
