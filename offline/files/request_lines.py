"""Request lines: copies some lines of a batch file unchanged, in the order of the file.

The file may be JSONL, one JSON array of requests, or either compressed with gzip. Memory is needed
for a sample's places and a piece of a line, or for one request.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

from pydantic_core import from_json

from tidemill.batch.file.formats import (
    HEAD_BYTES,
    FileFormat,
    detect_compression,
    detect_file,
    open_lines,
)
from tidemill.batch.file.lines import (
    BOM,
    JSON_WHITE_SPACE,
    BytesByLine,
    FormatError,
    LineError,
    parse_line,
    read_lines,
)
from tidemill.batch.table.detection import DELIMITERS, detect_table

from ..console.errors import BadInput, CliError
from .new_file import NewFile
from .source import Source
from .table_options import format_of

_PIECE_BYTES = 2**20


@dataclass(slots=True)
class CopiedRequests:
    """Numbers of non-blank lines, of copied ones, and of malformed ones."""

    num_lines: int = 0
    num_copied: int = 0
    num_malformed: int = 0


def detect_source(source: Source) -> FileFormat:
    """Return the format of a source; raises BadInput for an unsupported file."""
    try:
        return detect_file(source.file)
    except FormatError as exc:
        raise unreadable(source, exc) from exc


def is_table(source: Source) -> bool:
    """Return whether a file has rows instead of lines: Parquet, Arrow, or CSV or TSV with columns.

    A CSV row may span several lines. JSON and plain text files are copied by lines.
    """
    source.file.seek(0)
    head = source.file.read(HEAD_BYTES)
    form = detect_table(head)
    if form in {"csv", "tsv"} and format_of(source.name) != form:
        first_line = detect_compression(head)[1].split(b"\n", 1)[0]
        return any(mark.encode() in first_line for mark in DELIMITERS)
    return form is not None and form != "jsonl"


def first_value(source: Source) -> object:
    """Return the JSON value of a source's first line as it is; None if it cannot be read."""
    try:
        form = replace(detect_source(source), vendor=None)
        first = next(read_lines(open_lines(form, source.file)), None)
        return None if first is None else from_json(first.data)
    except (CliError, FormatError, ValueError):
        return None
    finally:
        source.file.seek(0)


def unreadable(source: Source, exc: FormatError) -> BadInput:
    """Return the error for a source that cannot be read to its end."""
    return BadInput(f"{source.name} cannot be read. {exc.message}")


def count_lines(source: Source, form: FileFormat) -> int:
    """Return the number of non-blank lines; raises BadInput for a damaged file."""
    num_lines = 0
    try:
        for place, _ in _pieces(open_lines(form, source.file)):
            num_lines = place + 1
    except FormatError as exc:
        raise unreadable(source, exc) from exc
    return num_lines


def choose_sample(num_lines: int, size: int, seed: int) -> list[int]:
    """Return the places of a uniform random sample in ascending order; all of a short file."""
    if size >= num_lines:
        return [*range(num_lines)]
    return sorted(random.Random(seed).sample(range(num_lines), size))  # noqa: S311 - no secret


def copy_lines(source: Source, form: FileFormat, places: Container[int], out: NewFile) -> None:
    r"""Write the lines at these places (0-based, without blank lines), each ending with `\n`."""
    try:
        pieces = _pieces(open_lines(form, source.file))
        for place, line in groupby(pieces, key=itemgetter(0)):
            if place not in places:
                continue
            is_ended = False
            for _, piece in line:
                out.write(piece)
                is_ended = piece.endswith(b"\n")
            if not is_ended:
                out.write(b"\n")
    except FormatError as exc:
        raise unreadable(source, exc) from exc


def copy_requests(source: Source, out: NewFile, is_wanted: Callable[[str], bool]) -> CopiedRequests:
    """Write the requests whose custom ID `is_wanted`, which is called once per line, in order."""
    form = detect_source(source)
    copied = CopiedRequests()
    try:
        for raw in read_lines(open_lines(form, source.file)):
            copied.num_lines += 1
            try:
                line = parse_line(raw)
            except LineError:
                copied.num_malformed += 1
                continue
            if is_wanted(line.custom_id):
                out.write(raw.data + b"\n")
                copied.num_copied += 1
    except FormatError as exc:
        raise unreadable(source, exc) from exc
    return copied


def _pieces(stream: BytesByLine) -> Iterator[tuple[int, bytes]]:
    """Yield the place of each non-blank line with its bytes, in pieces of bounded size."""
    place, is_first, is_new = -1, True, True
    while piece := stream.readline(_PIECE_BYTES):
        is_ended = piece.endswith(b"\n")
        if is_first:
            piece, is_first = piece.removeprefix(BOM), False
        if is_new:
            if not piece.strip(JSON_WHITE_SPACE) and (is_ended or len(piece) < _PIECE_BYTES):
                continue
            place += 1
        is_new = is_ended
        yield place, piece
