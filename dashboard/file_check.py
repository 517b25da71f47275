"""Check of a file before its upload, from its first bytes, by the parsers that read it later.

`check_file` says whether a batch can start, and what its requests look like. It reads no store.
"""

from __future__ import annotations

from typing import Final

from tidemill.batch.file.formats import begins_with_request, detect_format
from tidemill.batch.file.lines import FormatError
from tidemill.batch.table.detection import detect_table
from tidemill.batch.table.errors import TableError
from tidemill.protocol.validation import printable

from .binary_check import check_binary
from .checked_file import TABLE_KINDS, CheckOptions, FileCheck, FileStart
from .text_check import TextStart, check_requests, check_text_table

_LINES_SUFFIXES: Final = (".jsonl", ".ndjson", ".json")


def check_file(start: FileStart, options: CheckOptions) -> FileCheck:
    """Return what intake would say about a file, as far as its first bytes show."""
    try:
        form = None if begins_with_request(start.head) else detect_table(start.head)
        if form in {"parquet", "arrow"}:
            if not options.runs_tables:
                return FileCheck(kind=TABLE_KINDS[form], is_table=True)
            return check_binary(start, form, options)
        text = TextStart.of(start)
        if form == "jsonl" and options.recipe is None and detect_format(start.head).vendor:
            form = None
        if form is None or (form != "jsonl" and _is_named_or_has_requests(start, text.data)):
            return check_requests(detect_format(start.head), text, options)
        if not options.runs_tables:
            return FileCheck(kind=TABLE_KINDS[form], is_table=True)
        return check_text_table(form, text, options)
    except (FormatError, TableError) as exc:
        return FileCheck(errors=(printable(str(exc)),), num_errors=1)


def _is_named_or_has_requests(start: FileStart, text: bytes) -> bool:
    """Say whether a text that is not JSON at its start was meant to be requests."""
    is_named = start.name.lower().removesuffix(".gz").endswith(_LINES_SUFFIXES)
    return is_named or any(map(begins_with_request, text.split(b"\n", 100)[:100]))
