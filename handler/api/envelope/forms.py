"""`multipart/form-data` as bytes: whole and exact, or refused with a word why."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from aws_lambda_powertools.event_handler.openapi.params import UploadFile

from handler.api.envelope.errors import Refused

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

# Under these a part is sent as it is; no client of today uses another.
_PLAIN_ENCODINGS: Final = frozenset({b"", b"7bit", b"8bit", b"binary"})
_MAX_PARTS: Final = 100


@dataclass(slots=True)
class _Part:
    """One part while it is read: its headers by lower-case names, and where its bytes stand."""

    headers: dict[bytes, bytes] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)


def read_form(
    content_type: str, body: bytes, *, files: Collection[str]
) -> dict[str, UploadFile | str]:
    """Return the fields of a form by their names; bytes for those in `files`, else text.

    It makes no difference whether a part has a filename: `curl -F 'file=<x'` sends none. Raises
    Refused for what is no whole form, for a field that comes twice and for text that is not UTF-8.
    """
    found: dict[str, UploadFile | str] = {}
    for part in _read_parts(_boundary_of(content_type), body):
        name, filename = _names_of(part)
        if name in found:
            raise Refused(f"`{name}` comes more than once.", param=name, code="duplicate_field")
        if part.headers.get(b"content-transfer-encoding", b"").lower() not in _PLAIN_ENCODINGS:
            raise _refused(f"`{name}` has a Content-Transfer-Encoding: send it as it is")
        data = b"".join(part.pieces)
        found[name] = UploadFile(content=data, filename=filename) if name in files else _text(data)
    return found


def _boundary_of(content_type: str) -> bytes:
    from python_multipart.multipart import parse_options_header

    try:
        boundary = parse_options_header(content_type.encode("latin-1"))[1].get(b"boundary", b"")
    except UnicodeEncodeError:
        boundary = b""
    # RFC 2046; the parser itself would take more.
    if not 0 < len(boundary) <= 70 or boundary.endswith(b" "):
        raise _refused("its Content-Type names no boundary")
    return boundary


def _read_parts(boundary: bytes, body: bytes) -> list[_Part]:
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser

    reader = _Reader()
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        parser.write(body)
        parser.finalize()
    except FormParserError as exc:
        raise _refused(f"it cannot be read: {str(exc)[:200]}") from exc
    if not reader.is_whole:
        raise _refused("it ends before its last boundary")
    return reader.parts


class _Reader:
    """What the parser tells, put together."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self.is_whole = False
        self._name = self._value = b""

    def callbacks(self) -> MultipartCallbacks:
        """Return what the parser calls."""
        return {
            "on_part_begin": self._begin,
            "on_part_data": self._add_data,
            "on_header_field": self._add_name,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        if len(self.parts) == _MAX_PARTS:
            raise _refused(f"it has more than {_MAX_PARTS} fields")
        self.parts.append(_Part())

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        self.parts[-1].pieces.append(data[start:end])

    def _add_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        headers, name = self.parts[-1].headers, self._name.lower()
        if name in headers:
            raise _refused(f"a part has two headers {_shown(name)}")
        headers[name] = self._value.strip(b" \t")
        self._name = self._value = b""

    def _end(self) -> None:
        self.is_whole = True


def _names_of(part: _Part) -> tuple[str, str | None]:
    """Return the names of a part's field and of its file."""
    from python_multipart.multipart import parse_options_header

    kind, options = parse_options_header(part.headers.get(b"content-disposition", b""))
    if kind != b"form-data" or b"name" not in options:
        raise _refused("a part has no name")
    filename = options.get(b"filename")
    return _shown(options[b"name"]), None if filename is None else _shown(filename)


def _shown(name: bytes) -> str:
    """Names are UTF-8 as browsers and httpx send them, or whatever older clients have."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return name.decode("latin-1")


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        raise _refused("a field of it is no UTF-8") from exc


def _refused(words: str) -> Refused:
    return Refused(f"The body is no whole form: {words}.", code="invalid_multipart")
