"""Multipart forms: a streaming parser that stores fields as text and passes on a file's bytes."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import from_json
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from .errors import RequestError

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

# Encodings that leave a part unchanged; current clients use no others.
_PLAIN_ENCODINGS: Final = frozenset({b"", b"7bit", b"8bit", b"binary"})
_MAX_PARTS: Final = 100
_LIST: Final = "[]"
_MAX_HEAD_BYTES: Final = 16_384
_MAX_TEXT_BYTES: Final = 65_536
_NAME: Final = re.compile(r"([^\[\]]+)((?:\[[^\[\]]*\])*)")
_KEY: Final = re.compile(r"\[([^\[\]]*)\]")
_MAX_KEYS: Final = 4
_WORDS: Final = {"true": True, "false": False}


@dataclass(slots=True)
class _Part:
    """The current part: its headers by lower-case names, and its text."""

    headers: dict[bytes, bytes] = field(default_factory=dict)
    head_bytes: int = 0
    name: str = ""
    text: bytearray = field(default_factory=bytearray)


class FormReader:
    """Reads one form, whose field `file_field` may be of any size.

    Fields may be in any order, with or without a filename. A field named `…[]` is a list. An
    incomplete or malformed form raises `RequestError`, and so does any other field sent twice.
    """

    def __init__(self, content_type: str, file_field: str) -> None:
        self._parser = MultipartParser(_boundary_of(content_type), self._callbacks())
        self._file_field = file_field
        self._part = _Part()
        self._header_name = self._header_value = b""
        self._names: set[str] = set()
        self._num_parts = 0
        self._arrived: list[bytes] = []
        self._is_whole = False
        self.fields: dict[str, str] = {}
        self.lists: dict[str, list[str]] = {}
        self.filename: str | None = None

    @property
    def has_file(self) -> bool:
        """Say whether the file field has started to arrive."""
        return self._file_field in self._names

    def read(self, chunk: bytes) -> bytes:
        """Parse the next bytes of the body; return the file's bytes among them."""
        try:
            self._parser.write(chunk)
        except FormParserError as exc:
            raise _refused(f"it is malformed: {str(exc)[:200]}") from exc
        arrived = b"".join(self._arrived)
        self._arrived.clear()
        return arrived

    def end(self) -> None:
        """Raise `RequestError` unless the form is complete."""
        try:
            self._parser.finalize()
        except FormParserError as exc:
            raise _refused(f"it is malformed: {str(exc)[:200]}") from exc
        if not self._is_whole:
            raise _refused("it ends before the closing boundary")

    def _callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin_part,
            "on_part_data": self._add_data,
            "on_part_end": self._end_part,
            "on_header_field": self._add_name,
            "on_header_value": self._add_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_end": self._end,
        }

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise _refused(f"it has more than {_MAX_PARTS} fields")
        self._part = _Part()

    def _add_name(self, data: bytes, start: int, end: int) -> None:
        self._count_head(end - start)
        self._header_name += data[start:end]

    def _add_value(self, data: bytes, start: int, end: int) -> None:
        self._count_head(end - start)
        self._header_value += data[start:end]

    def _count_head(self, num_bytes: int) -> None:
        self._part.head_bytes += num_bytes
        if self._part.head_bytes > _MAX_HEAD_BYTES:
            raise _refused("the headers of a part are too long")

    def _end_header(self) -> None:
        headers, name = self._part.headers, self._header_name.lower()
        if name in headers:
            raise _refused(f"a part has two headers {_decode_name(name)}")
        headers[name] = self._header_value.strip(b" \t")
        self._header_name = self._header_value = b""

    def _end_headers(self) -> None:
        part = self._part
        kind, options = parse_options_header(part.headers.get(b"content-disposition", b""))
        if kind != b"form-data" or b"name" not in options:
            raise _refused("a part has no name")
        part.name = _decode_name(options[b"name"])
        if part.name in self._names and not part.name.endswith(_LIST):
            raise RequestError(
                f"`{part.name}` is sent more than once.", param=part.name, code="duplicate_field"
            )
        self._names.add(part.name)
        if part.headers.get(b"content-transfer-encoding", b"").lower() not in _PLAIN_ENCODINGS:
            raise _refused(f"`{part.name}` has a Content-Transfer-Encoding: send it unencoded")
        if part.name == self._file_field and b"filename" in options:
            self.filename = _decode_name(options[b"filename"])

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        if self._part.name == self._file_field:
            self._arrived.append(data[start:end])
            return
        self._part.text += data[start:end]
        if len(self._part.text) > _MAX_TEXT_BYTES:
            raise _refused(f"`{self._part.name}` is longer than {_MAX_TEXT_BYTES:,} bytes")

    def _end_part(self) -> None:
        if self._part.name == self._file_field:
            return
        try:
            text = self._part.text.decode()
        except UnicodeDecodeError as exc:
            raise _refused(f"`{self._part.name}` is not UTF-8") from exc
        if self._part.name.endswith(_LIST):
            self.lists.setdefault(self._part.name, []).append(text)
        else:
            self.fields[self._part.name] = text

    def _end(self) -> None:
        self._is_whole = True


def values(form: FormReader, texts: Collection[str]) -> dict[str, Any]:
    """Return the fields of a form as a JSON body, by the naming conventions of OpenAI's clients.

    `name[]` is a list and `name[key]` an object. A value that is not in `texts` is parsed if it is
    valid JSON; an empty field is left out, as FastAPI does. Raises `RequestError` for a field in
    two conflicting forms.
    """
    body: dict[str, Any] = {}
    for name, text in form.fields.items():
        if text:
            _put(body, name, text if name in texts else _value(text))
    for name, given in form.lists.items():
        top = name.removesuffix(_LIST)
        _put(body, top, given if top in texts else [_value(text) for text in given])
    return body


def _put(body: dict[str, Any], name: str, value: object) -> None:
    match = _NAME.fullmatch(name)
    top, keys = (match[1], _KEY.findall(match[2])) if match else (name, [])
    if len(keys) > _MAX_KEYS:
        raise RequestError(f"`{top}` has too many keys in its name.", param=top)
    holder: Any = body
    last = top
    for key in keys:
        holder, last = holder.setdefault(last, {}), key
        if not isinstance(holder, dict):
            break
    if not isinstance(holder, dict) or last in holder:
        raise RequestError(f"`{top}` is sent in two forms.", param=top, code="duplicate_field")
    holder[last] = value


def _value(text: str) -> Any:
    try:
        return from_json(text)
    except ValueError:
        return _WORDS.get(text.lower(), text)


def _boundary_of(content_type: str) -> bytes:
    try:
        kind, options = parse_options_header(content_type.encode("latin-1"))
    except UnicodeEncodeError:
        kind, options = b"multipart/form-data", {}
    if kind != b"multipart/form-data":
        raise RequestError("The body must be multipart/form-data.", code="unsupported_content_type")
    boundary = options.get(b"boundary", b"")
    # RFC 2046; the parser itself accepts more.
    if not 0 < len(boundary) <= 70 or boundary.endswith(b" "):
        raise _refused("its Content-Type has no valid boundary")
    return boundary


def _decode_name(name: bytes) -> str:
    """Return a name decoded as UTF-8, as browsers and httpx send it, or else as Latin-1."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return name.decode("latin-1")


def _refused(words: str) -> RequestError:
    return RequestError(f"The body is not a complete form: {words}.", code="invalid_multipart")
