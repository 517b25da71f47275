"""File formats: detects one by a file's first bytes, and decodes its requests to plain JSONL.

Supported are JSONL, one JSON array of requests, and either of them compressed with gzip. Requests
may be in other vendors' forms (`vendor_lines`). Other files are refused with a sentence that says
what the file is and what to do. Memory stays bounded for any file: chunks of bytes go in, and
chunks of bytes come out.
"""

from __future__ import annotations

import csv
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Literal, Protocol

from pydantic_core import from_json

from ..column_spelling import expression_of
from .json_array import elements_as_lines
from .lines import BOM, JSON_WHITE_SPACE, BytesByLine, FormatError, Vendor, check_line_length

# The number of bytes that `detect_format` needs, or the whole of a shorter file.
HEAD_BYTES = 2**16

_REQUEST_NAMES = (b'"custom_id"', b'"body"')
_CONTENTS: dict[Vendor | None, str] = {
    None: "requests",
    "anthropic": "Anthropic requests",
    "bedrock": "Bedrock records",
    "gemini": "Gemini requests",
    "no_url": "requests without `url`",
    "chats": "chats",
}

_GZIP = b"\x1f\x8b"
_GZIP_WINDOW = 31  # zlib's code for a gzip header and the largest window
_PACKED_BYTES = 2**14
_UNPACKED_BYTES = 2**18
_READ_BYTES = 2**20
_MAX_NAME_CHARS = 100
# Requests that share a long prompt expand to a hundred times their size; gzip's maximum is a
# thousand. An excess up to a silent recording in base64 is allowed above the ratio.
_MAX_RATIO = 400
_MAX_EXCESS_BYTES = 2**25

_ARCHIVE = "The file is {}: extract it, and use the JSONL file inside."
_PACKED = "The file is compressed with {}: use gzip or plain JSONL."
_TABLE = (
    "The file is {}: define a request for each row, with `tidemill run --prompt TEMPLATE` or with "
    "a recipe next to it (NAME.recipe.toml)."
)
_UTF_16 = "The file is UTF-16: save it as UTF-8."
_WORKBOOK = "The file is {}: save it as CSV UTF-8."
_DOCUMENT = "The file is {}: save its text as JSONL with one request per line, or as a table."
_ZIP = b"PK\x03\x04"
_ZIPPED_DOCUMENTS = (
    # Names of entries, and the type that is the first entry of an OpenDocument file.
    (b"xl/work", _WORKBOOK.format("an Excel workbook")),
    (b"application/vnd.oasis.opendocument.spreadsheet", _WORKBOOK.format("a spreadsheet")),
    (b"word/document", _DOCUMENT.format("a Word document")),
)
_SIGNATURES = (
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", _WORKBOOK.format("an Excel workbook (.xls)")),
    (_ZIP, _ARCHIVE.format("a zip archive")),
    (b"PK\x05\x06", _ARCHIVE.format("an empty zip archive")),
    (b"7z\xbc\xaf\x27\x1c", _ARCHIVE.format("a 7z archive")),
    (b"Rar!\x1a\x07", _ARCHIVE.format("a rar archive")),
    (b"\x28\xb5\x2f\xfd", _PACKED.format("zstd")),
    (b"BZh", _PACKED.format("bzip2")),
    (b"\xfd7zXZ\0", _PACKED.format("xz")),
    (b"\x04\x22\x4d\x18", _PACKED.format("lz4")),
    (b"PAR1", _TABLE.format("a Parquet table")),
    (b"PARE", "The file is an encrypted Parquet table: write it without encryption."),
    (b"ARROW1", _TABLE.format("an Arrow table")),
    (b"%PDF-", _DOCUMENT.format("a PDF document")),
    (b"\xff\xfe", _UTF_16),
    (b"\xfe\xff", _UTF_16),
    (b"{\0", _UTF_16),
    (b"\0{", _UTF_16),
    (b"[\0", _UTF_16),
    (b"\0[", _UTF_16),
)
_TAR_OFFSET, _TAR = 257, b"ustar"


@dataclass(frozen=True, slots=True)
class FileFormat:
    """Format of a file of requests: gzip or not, JSON array or lines.

    A recipe (`batch.table`) renders the requests of a table. `suspicion` describes the file's
    apparent format with advice; it becomes the error if no line is a request, and never alone
    rejects a file. `vendor` is the form of the first line, and `url` the endpoint of requests that
    name none.
    """

    is_gzip: bool = False
    is_array: bool = False
    suspicion: str | None = None
    is_table: bool = False
    vendor: Vendor | None = None
    url: str | None = None

    @property
    def is_plain(self) -> bool:
        """Say whether the file is already plain JSONL."""
        return not (self.is_gzip or self.is_array or self.is_table or self.vendor)

    @property
    def contents(self) -> str:
        """Return what its lines are."""
        return _CONTENTS[self.vendor]

    @property
    def suffix(self) -> str:
        """Return the suffix of a file of requests in this format, such as `.jsonl.gz`."""
        return (".json" if self.is_array else ".jsonl") + (".gz" if self.is_gzip else "")

    @property
    def unit(self) -> Literal["line", "element", "row"]:
        """Return what the author's numbers of requests count."""
        if self.is_table:
            return "row"
        return "element" if self.is_array else "line"


def begins_with_request(text: bytes) -> bool:
    """Say whether the first line of a text is an object with the fields of a request."""
    line = text.partition(b"\n")[0]
    return line.startswith(b"{") and any(name in line for name in _REQUEST_NAMES)


def detect_format(head: bytes, url: str | None = None) -> FileFormat:
    """Return the format of a file that begins with `head`, of up to `HEAD_BYTES`.

    `url` is the endpoint of requests that name none. Raises FormatError for an unsupported format.
    """
    if not head.startswith(_GZIP):
        form = _detect_text_format(head)
        return form if form.vendor is None else replace(form, url=url)
    inner = next(filter(None, gunzip((head,), is_whole=False)), b"")[:HEAD_BYTES]
    if inner.startswith(_GZIP):
        raise FormatError("The file is compressed with gzip twice: decompress it once.")
    form = _detect_text_format(inner)
    return replace(form, is_gzip=True, url=None if form.vendor is None else url)


def detect_file(file: BinaryFile, url: str | None = None) -> FileFormat:
    """Return the format of an open file, as `detect_format`."""
    file.seek(0)
    return detect_format(file.read(HEAD_BYTES), url)


def detect_compression(head: bytes) -> tuple[Callable[[BinaryFile], BinaryFile], bytes]:
    """Return a function that opens a text file from its start, and the first bytes of the text.

    Raises FormatError for files that are neither text nor gzip.
    """
    if head.startswith(_GZIP):
        form, head = (
            FileFormat(is_gzip=True),
            next(filter(None, gunzip((head,), is_whole=False)), b""),
        )
    else:
        form = FileFormat()
    _refuse_signatures(head)
    return partial(open_lines, form), head


def _refuse_signatures(head: bytes) -> None:
    if head.startswith(_ZIP):
        for mark, sentence in _ZIPPED_DOCUMENTS:
            if mark in head:
                raise FormatError(sentence)
    for signature, sentence in _SIGNATURES:
        if head.startswith(signature):
            raise FormatError(sentence)
    if head[_TAR_OFFSET:].startswith(_TAR):
        raise FormatError(_ARCHIVE.format("a tar archive"))


def _detect_text_format(head: bytes) -> FileFormat:
    _refuse_signatures(head)
    text = head.removeprefix(BOM).strip(JSON_WHITE_SPACE)
    if is_array_of_objects(text):
        return FileFormat(is_array=True, vendor=_vendor_of(text))
    return FileFormat(suspicion=_suspicion(text), vendor=_vendor_of(text.split(b"\n", 1)[0]))


def _vendor_of(text: bytes) -> Vendor | None:
    """Return the vendor of a text's first object, which may be truncated; None for OpenAI."""
    try:
        first = from_json(text, allow_partial=True)
    except ValueError:
        return None
    if isinstance(first, list) and first:
        first = first[0]
    if not isinstance(first, dict) or "url" in first:
        return None
    request = first.get("request")
    if "modelInput" in first:
        return "bedrock"
    if isinstance(request, dict) and ("key" in first or "contents" in request):
        return "gemini"
    if isinstance(first.get("params"), dict) and "body" not in first:
        return "anthropic"
    if isinstance(first.get("body"), dict):
        return "no_url"
    return "chats" if isinstance(first.get("messages"), list) else None


def is_array_of_objects(text: bytes) -> bool:
    """Say whether a text, without leading white space, is one JSON array of objects."""
    return text.startswith(b"[") and text[1:].lstrip(JSON_WHITE_SPACE)[:1] in {b"{", b"]", b""}


def mistake_of_lines(first_line: bytes) -> str | None:
    """Return a description and advice for lines that are JSON but not objects, else None."""
    if first_line.startswith(b"{") and first_line.endswith(b","):
        if isinstance(_json_of(first_line[:-1]), dict):
            return "A comma follows each line: remove the commas, or put the lines in `[` and `]`."
    elif first_line.startswith(b'"') and isinstance(text := _json_of(first_line), str):
        if isinstance(_json_of(text), dict):
            return (
                "Each line is a JSON string that contains an object: write the object itself, "
                "without the surrounding quotes and backslashes."
            )
    elif first_line.startswith(b"[") and isinstance(_json_of(first_line), list):
        return (
            "This looks like JSON arrays: write one JSON object per line, or one array of objects."
        )
    return None


def _json_of(text: str | bytes) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _suspicion(text: bytes) -> str | None:
    first_line = text.split(b"\n", 1)[0].strip(JSON_WHITE_SPACE)
    if b"\0" in text:
        return "The file has NUL bytes, so it is not text: write plain JSONL."
    if (mistake := mistake_of_lines(first_line)) is not None:
        return mistake
    if first_line in {b"{", b'{"'} or (text.startswith(b"{") and first_line.endswith((b"{", b","))):
        return "This looks like JSON over several lines: write each object on one line."
    if text.startswith(b"["):
        return (
            "This looks like JSON arrays: write one JSON object per line, or one array of objects."
        )
    if not text or text.startswith(b"{"):
        return None
    kinds = {b"\t": "tab-separated values", b",": "CSV"}
    kind = next((kind for mark, kind in kinds.items() if mark in first_line), "plain text")
    if kind == "plain text":
        return f"This looks like {kind}: write one JSON object per line."
    words = _TABLE.format(kind).replace("The file is", "This looks like")
    column = _column_of(text, "\t" if kinds[b"\t"] == kind else ",")
    return words if column is None else f"{words} Example: --prompt '{expression_of(column)}'"


def _column_of(text: bytes, delimiter: str) -> str | None:
    """Return the column with the longest cell in the first row."""
    lines = io.StringIO(text.decode("utf-8-sig", "replace"), newline="")
    try:
        names, cells = islice(csv.reader(lines, delimiter=delimiter), 2)
    except (csv.Error, ValueError):  # not a header and a row
        return None
    name = max(zip(names, cells, strict=False), key=lambda pair: len(pair[1]))[0]
    if not name.isprintable() or '"' in name or not 0 < len(name) <= _MAX_NAME_CHARS:
        return None
    return name


def as_lines(form: FileFormat, pieces: Iterable[bytes]) -> Iterator[bytes]:
    r"""Yield the bytes of a file of this format as JSONL, from its start.

    Line N is the file's line N, or element N of its array. The result does not depend on the
    chunks; bytes without output give empty chunks. Raises FormatError for a damaged or truncated
    file, or a line longer than any request.
    """
    if form.is_gzip:
        pieces = gunzip(pieces)
    return as_requests(form, elements_as_lines(pieces) if form.is_array else _bounded(pieces))


def as_requests(form: FileFormat, lines: Iterator[bytes]) -> Iterator[bytes]:
    """Yield JSONL of a vendor's requests as OpenAI's."""
    if form.vendor is None:
        return lines
    from .vendor_lines import request_lines  # late: most files have OpenAI's form

    return request_lines(form.vendor, lines, form.url)


class BinaryFile(BytesByLine, Protocol):
    """A binary file to read, such as an open local file."""

    def seek(self, position: int, /) -> int:
        """Move to a byte of it."""

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes, none only at the end."""


def open_lines(form: FileFormat, file: BinaryFile) -> BinaryFile:
    """Return a file of this format as a JSONL stream from its start; plain JSONL is unchanged."""
    file.seek(0)
    if form.is_plain:
        return file
    return stream_of(as_lines(form, _pieces(file)))


def stream_of(pieces: Iterator[bytes]) -> io.BufferedReader:
    """Return pieces, which may be empty, as a stream."""
    return io.BufferedReader(_Stream(pieces), _READ_BYTES)


def array_lines(file: BinaryFile) -> BinaryFile:
    """Return the elements of a JSON array, in a file at its start, as lines."""
    return stream_of(elements_as_lines(_pieces(file)))


def _pieces(file: BinaryFile) -> Iterator[bytes]:
    return iter(lambda: file.read(_READ_BYTES), b"")


class _Stream(io.RawIOBase):
    """Chunks of bytes as a stream that can be read once."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        super().__init__()
        self._pieces = pieces
        self._piece = memoryview(b"")

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill the buffer with the available bytes, at least one unless the end is reached."""
        while not self._piece:
            if (piece := next(self._pieces, None)) is None:
                return 0
            self._piece = memoryview(piece)
        size = min(len(buffer), len(self._piece))
        buffer[:size] = self._piece[:size]
        self._piece = self._piece[size:]
        return size


def _bounded(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the chunks; raises FormatError for an endless line."""
    number, length = 1, 0
    for piece in pieces:
        newlines = piece.count(b"\n")
        number += newlines
        length = len(piece) - piece.rfind(b"\n") - 1 if newlines else length + len(piece)
        check_line_length(number, length, "line")
        yield piece


def gunzip(pieces: Iterable[bytes], *, is_whole: bool = True) -> Iterator[bytes]:
    """Yield decompressed gzip data in bounded chunks; several members make one file.

    Data without output gives empty chunks, so that the reader regains control regularly.
    Raises FormatError with the byte for damaged data, for truncated data if it `is_whole`, and for
    a decompression bomb anywhere in the data.
    """
    unpacker = zlib.decompressobj(_GZIP_WINDOW)
    offset = excess = 0
    for packed in _cut(pieces, _PACKED_BYTES):
        left, is_empty = packed, True
        excess = max(0, excess) - _MAX_RATIO * len(packed)
        while left or not unpacker.eof:
            if unpacker.eof:
                # Zero padding is allowed after a member.
                if not (left := left.lstrip(b"\0")):
                    break
                unpacker = zlib.decompressobj(_GZIP_WINDOW)
            data, left = _unpack(unpacker, left, offset + len(packed))
            if data:
                if (excess := excess + len(data)) > _MAX_EXCESS_BYTES:
                    raise _bomb(offset)
                yield data
                is_empty = False
            elif not left:
                break
        if is_empty:
            yield b""
        offset += len(packed)
    if is_whole and not unpacker.eof:
        raise FormatError(
            f"The gzip data is truncated after {offset:,} bytes: is the file complete?",
            offset=offset,
        )


def _bomb(offset: int) -> FormatError:
    return FormatError(
        f"The gzip data expands to more than {_MAX_RATIO} times its size, from about byte "
        f"{offset:,} on: if it is a valid file of requests, decompress it first.",
        offset=offset,
    )


def _unpack(unpacker: zlib._Decompress, packed: bytes, offset: int) -> tuple[bytes, bytes]:
    """Return some decompressed bytes, and the rest of the compressed ones."""
    try:
        data = unpacker.decompress(packed, _UNPACKED_BYTES)
    except zlib.error as exc:
        reason = str(exc).rsplit(": ", 1)[-1]
        raise FormatError(
            f"The gzip data is damaged at byte {offset:,} or before ({reason}): compress it again.",
            offset=offset,
        ) from exc
    return data, unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail


def _cut(pieces: Iterable[bytes], size: int) -> Iterator[bytes]:
    for piece in pieces:
        for start in range(0, len(piece), size):
            yield piece[start : start + size]
