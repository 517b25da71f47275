"""Row file: rows of an output of Tidemill or another batch API, in order or at any offset."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from pydantic_core import from_json

from tidemill.batch.file.formats import open_lines
from tidemill.batch.file.lines import BOM, JSON_WHITE_SPACE, FormatError
from tidemill.batch.file.rows import row_error_message

from ..console.errors import BadInput
from ..console.terminal import log
from .line_file import LineFile
from .request_lines import detect_source, unreadable
from .source import Source, open_source, temporary_file

_MAX_ROW_BYTES = 2**28
_COPIED_BYTES = 2**20


class RowPlace(NamedTuple):
    """Position of a row in its file; `number` is 1-based and includes blank lines."""

    number: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredRow:
    """A row as it was read: `body` is its answer; None if there is an `error` instead.

    `row_id`, `custom_id` and `status` are None if the row has none.
    """

    row_id: str | None
    custom_id: str | None
    body: Mapping[str, Any] | None
    error: str | None
    status: int | None = None

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Return the row of a parsed line in either dialect."""
        response, message = fields.get("response"), row_error_message(fields)
        body, status = None, None
        if isinstance(response, dict):
            body, status = response.get("body"), response.get("status_code")
        is_ok = message is None and isinstance(body, dict) and status in {200, None}
        if not is_ok and message is None:
            message = "the row has no answer" if status is None else f"status {status}"
        row_id, custom_id = fields.get("id"), fields.get("custom_id")
        return cls(
            row_id if isinstance(row_id, str) else None,
            custom_id if isinstance(custom_id, str) else None,
            body if is_ok else None,
            message,
            status if isinstance(status, int) else None,
        )


class RowFile:
    """An open file of rows, plain JSONL on a disk."""

    def __init__(self, file: IO[bytes], source: Source) -> None:
        self._file = file
        self._source = source
        self.name = source.name

    @property
    def num_bytes(self) -> int:
        """Return the size of the plain rows."""
        return os.fstat(self._file.fileno()).st_size

    def rows(self) -> Iterator[tuple[RowPlace, StoredRow]]:
        """Yield the rows in order; raises BadInput for a line that is not a row.

        An incomplete last row, as of a running run, is skipped with a note.
        """
        for place, fields in self._parsed():
            yield place, self._row(place.number, fields)

    def fields(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield the number and the fields of each row, as `rows` does."""
        for place, fields in self._parsed():
            self._row(place.number, fields)
            assert isinstance(fields, dict)
            yield place.number, fields

    def _parsed(self) -> Iterator[tuple[RowPlace, object]]:
        self._file.seek(0)
        number = offset = 0
        while data := self._file.readline(_MAX_ROW_BYTES):
            number += 1
            place = RowPlace(number, offset, len(data))
            offset += len(data)
            if not data.strip(JSON_WHITE_SPACE):
                continue
            if len(data) == _MAX_ROW_BYTES and not data.endswith(b"\n"):
                raise self._bad(number, f"has more than {_MAX_ROW_BYTES:,} bytes")
            try:
                fields = self._parse_json(number, data)
            except BadInput:
                if data.endswith(b"\n") or number == 1:
                    raise
                log(f"note: skipped row {number:,} of {self.name}, which is incomplete")
                return
            yield place, fields

    def parse(self, number: int, data: bytes) -> StoredRow:
        """Return the row of a line; raises BadInput for a line that is not a row."""
        return self._row(number, self._parse_json(number, data))

    @property
    def lines(self) -> LineFile:
        """Return the lines of the plain rows, readable from any number on."""
        return LineFile(self._file, self._source)

    def read(self, place: RowPlace) -> StoredRow:
        """Return the row at a place; raises InputChanged for a file that was modified."""
        self._source.check()
        data = os.pread(self._file.fileno(), place.num_bytes, place.offset)
        return self.parse(place.number, data)

    def _row(self, number: int, fields: object) -> StoredRow:
        if not isinstance(fields, dict):
            raise self._bad(number, "is not a JSON object")
        if not fields.keys() & {"response", "error"}:
            if fields.keys() >= {"url", "body"}:
                raise self._bad(number, "is a request: pass the file with its answers")
            raise self._bad(number, "is not a row of a batch output: it has no `response`")
        if not isinstance(fields.get("custom_id"), str | None):
            raise self._bad(number, "has a `custom_id` that is not a string")
        return StoredRow.from_fields(fields)

    def _parse_json(self, number: int, data: bytes) -> object:
        data = data.removeprefix(BOM)
        try:
            parsed: object = from_json(data)
        except ValueError:
            try:
                # Other programs write lone surrogates, which the faster parser rejects.
                parsed = json.loads(data)
            except (ValueError, RecursionError) as exc:
                raise self._bad(number, f"is not JSON ({exc})") from exc
        return parsed

    def _bad(self, number: int, words: str) -> BadInput:
        return BadInput(f"row {number:,} of {self.name} {words}")


@contextmanager
def open_rows(name: str, *, tmp_dir: Path | None) -> Iterator[RowFile]:
    """Open a file of rows; a compressed file or array is unpacked to a temporary file."""
    with open_source(name, tmp_dir=tmp_dir) as source, plain_copy(source, tmp_dir) as opened:
        yield RowFile(*opened)


@contextmanager
def plain_copy(
    source: Source, tmp_dir: Path | None, *, as_requests: bool = False
) -> Iterator[tuple[IO[bytes], Source]]:
    """Yield a source as plain JSONL: the source itself, or a temporary file.

    Lines of other vendors stay as they are, unless they are read `as_requests`.
    """
    form = detect_source(source)
    if not as_requests:
        form = replace(form, vendor=None)
    if form.is_plain:
        yield source.file, source
        return
    with ExitStack() as stack:
        copy = temporary_file(stack, tmp_dir)
        try:
            stream = open_lines(form, source.file)
            while data := stream.read(_COPIED_BYTES):
                copy.write(data)
            copy.flush()
        except FormatError as exc:
            raise unreadable(source, exc) from exc
        except OSError as exc:
            raise BadInput(
                f"{source.name} cannot be unpacked to {tmp_dir or tempfile.gettempdir()} "
                f"({exc.strerror}): pass --output-tmp-dir to use another folder"
            ) from exc
        yield copy, source
