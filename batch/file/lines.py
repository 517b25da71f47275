"""Lines of a batch file: bytes in, one `Line` or one `LineError` out for each non-blank line.

Memory is bounded by the longest allowed line, not by the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, Protocol

from pydantic_core import from_json

from tidemill.protocol.errors import ProtocolError
from tidemill.protocol.json_bodies import MAX_CONTAINERS, TooManyValues, load_json

# A recording of 25 MiB in base64, and the rest of its request.
MAX_LINE_BYTES = 36 * 2**20
# A longer line is not a request, but a reader that skips a line must find its end.
MAX_SKIPPED_BYTES = 2**30
METHOD = "POST"
INVALID_METHOD = "invalid_method"
EXAMPLE_LINE = (
    '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", '
    '"body": {"messages": [{"role": "user", "content": "Hello"}]}}'
)
"""A request that any chat model answers, as an example in error messages."""

INVALID_CELL = "invalid_cell"
VENDOR_PLACES = "vendor_places"
"""Field of a line that was a vendor's: its form, and the places of its chat's messages in it."""

PLACES_MARK = f'"{VENDOR_PLACES}"'.encode()
"""Bytes of a line that may have such places."""

ROW_ERROR = "row_error"
"""Field of a line that gives no request: an object of `message`, `column` and perhaps `code`."""

Vendor = Literal["anthropic", "bedrock", "gemini", "no_url", "chats"]
"""Forms of lines other than OpenAI's; `no_url` lines are OpenAI's without `url`."""

_VENDOR_BODIES = ("params", "modelInput", "request")

BOM = b"\xef\xbb\xbf"
JSON_WHITE_SPACE = b" \t\r\n"

_DIGEST_BYTES = 12
_SKIP_BYTES = 2**20
_SHORT_BYTES = MAX_CONTAINERS  # a shorter line cannot have too many values
_new = tuple.__new__  # a third of the time of a named tuple's own constructor
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_JSON_TYPES = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}


class LineError(ProtocolError):
    """A line of a file that is not a valid request.

    `line` counts from 1 and includes blank lines; `code` is one of the batch error codes
    (`invalid_json_line`, `missing_required_parameter`, …); `custom_id` is None if it has none.
    """

    def __init__(
        self,
        message: str,
        *,
        line: int,
        code: str = "invalid_json_line",
        param: str | None = None,
        custom_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.line = line
        self.code = code
        self.param = param
        self.custom_id = custom_id


class FormatError(ProtocolError):
    """A file that cannot be read as requests; its message is a sentence for the file's author.

    `number` is the line or element at fault, `offset` the byte of the file, if known.
    """

    code = "invalid_json_line"

    def __init__(
        self, message: str, *, number: int | None = None, offset: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.number = number
        self.offset = offset


def check_line_length(number: int, num_bytes: int, unit: str = "line") -> None:
    """Raise FormatError for a line, or element, with more bytes than any request."""
    if num_bytes > MAX_SKIPPED_BYTES:
        raise endless_line(number, unit)


def endless_line(number: int, unit: str = "line") -> FormatError:
    """Return the error for a file with a line, or element, of such a length."""
    return FormatError(
        f"{unit.capitalize()} {number:,} is longer than any request may be.",
        number=number,
    )


class BytesByLine(Protocol):
    """A buffered binary stream, such as an open file."""

    def readline(self, size: int, /) -> bytes:
        r"""Return the bytes up to and including the next `\n`, at most `size`; none at the end."""


class Overlong(NamedTuple):
    """Length and digest of a line that was skipped because it is longer than `limit` bytes."""

    num_bytes: int
    limit: int
    digest: str


class RawLine(NamedTuple):
    """One line of the file, without its newline; `number` counts from 1."""

    number: int
    data: bytes
    overlong: Overlong | None = None

    @property
    def num_bytes(self) -> int:
        """Return its length in the file."""
        return len(self.data) if self.overlong is None else self.overlong.num_bytes

    @property
    def digest(self) -> str:
        """24 hex digits of the line's number and bytes: unique, and the same in every run."""
        if self.overlong is not None:
            return self.overlong.digest
        number, data = self.number.to_bytes(8, "little"), self.data
        if len(data) <= _SHORT_BYTES:
            return blake2b(number + data, digest_size=_DIGEST_BYTES).hexdigest()
        digest = blake2b(number, digest_size=_DIGEST_BYTES)
        digest.update(data)
        return digest.hexdigest()


class Line(NamedTuple):
    """One request of a file. `digest` is `RawLine.digest`: IDs of rows and replies derive from it.

    Those of a reply derive from its `request_id`, which contains nothing random.
    A run accepts any `method`, as vLLM does; a batch accepts only POST, as OpenAI does.
    """

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]
    digest: str
    request_id: str
    method: str = METHOD


def read_lines(
    stream: BytesByLine, *, max_line_bytes: int = MAX_LINE_BYTES, first_number: int = 1
) -> Iterator[RawLine]:
    r"""Yield the non-blank lines, split only on `\n`; line numbers include blank lines.

    A byte order mark at the start of line 1 is dropped. A line above `max_line_bytes` is skipped in
    chunks and returned as `overlong`, without its bytes.
    """
    placed = read_placed_lines(stream, max_line_bytes=max_line_bytes, first_number=first_number)
    for raw, _ in placed:
        yield raw


def read_placed_lines(
    stream: BytesByLine,
    *,
    max_line_bytes: int = MAX_LINE_BYTES,
    first_number: int = 1,
    start: int = 0,
    end: int | None = None,
) -> Iterator[tuple[RawLine, int]]:
    """Yield the lines of `read_lines`, each with the position of its first byte.

    The stream is at position `start`. The lines from position `end` on, if given, are not read.
    """
    number, position, readline = first_number - 1, start, stream.readline
    while position != end and (data := readline(max_line_bytes + 1)):
        number += 1
        first = position
        if number == 1 and data.startswith(BOM):
            data, first = data[len(BOM) :], first + len(BOM)
            if not data.endswith(b"\n"):
                data += readline(max_line_bytes + 1 - len(data))
        position = first + len(data)
        if data.endswith(b"\n"):
            data = data[:-1]
        elif len(data) > max_line_bytes:
            overlong = _skip(stream, number, data, max_line_bytes)
            position = first + overlong.num_bytes + 1
            yield RawLine(number, b"", overlong), first
            continue
        if data.strip(JSON_WHITE_SPACE):
            yield _new(RawLine, (number, data, None)), first


def _skip(stream: BytesByLine, number: int, start: bytes, limit: int) -> Overlong:
    """Read to the end of a line that began with `start`, and keep only its length and digest."""
    digest = blake2b(number.to_bytes(8, "little"), digest_size=_DIGEST_BYTES)
    digest.update(start)
    num_bytes = len(start)
    ended = False
    while not ended and (chunk := stream.readline(_SKIP_BYTES)):
        ended = chunk.endswith(b"\n")
        content = chunk[:-1] if ended else chunk
        digest.update(content)
        num_bytes += len(content)
    return Overlong(num_bytes, limit, digest.hexdigest())


def parse_line(raw: RawLine, *, in_slices: bool = False) -> Line:
    """Return the request of a line, with an unchecked body; raises LineError as `parse_fields`.

    With `in_slices` another thread's event loop keeps running while a large line is parsed.
    """
    return line_of(raw, parse_fields(raw, in_slices=in_slices))


def line_of(raw: RawLine, fields: dict[str, Any]) -> Line:
    """Return the request of a line with these fields of `parse_fields`."""
    number, digest = raw.number, raw.digest
    custom_id, url, body = fields["custom_id"], fields["url"], fields["body"]
    method = fields.get("method", METHOD)
    return _new(Line, (number, custom_id, url, body, digest, f"req_{digest}", method))


def parse_fields(raw: RawLine, *, in_slices: bool = False) -> dict[str, Any]:
    """Return the fields of a line's request: `custom_id`, `url`, an unchecked `body` and others.

    Raises LineError for a line that is not a JSON object or lacks a required field. NaN and
    infinities pass here, so that the body's own check can answer that one row with a 400.
    """
    data = raw.data
    try:
        fields = from_json(data, cache_strings="keys") if len(data) <= _SHORT_BYTES else None
    except ValueError:
        fields = None
    if type(fields) is not dict:
        fields = _parse_object(raw, in_slices=in_slices)
    get = fields.get
    is_named = type(get("custom_id")) is str and type(get("url")) is str
    has_body = type(get("body")) is dict and type(get("method", METHOD)) is str
    if not (is_named and has_body) or ROW_ERROR in fields:
        _check_fields(raw, fields)
    return fields


def _check_fields(raw: RawLine, fields: dict[str, Any]) -> None:
    """Raise LineError for the error of a row of a table, or a field of another type."""
    custom_id = fields.get("custom_id")
    known_id = custom_id if isinstance(custom_id, str) else None
    if isinstance(row_error := fields.get(ROW_ERROR), dict):
        raise LineError(
            str(row_error.get("message")),
            line=raw.number,
            code=str(row_error.get("code", INVALID_CELL)),
            param=row_error.get("column"),
            custom_id=known_id,
        )
    if fields.get("body") is None and "url" in fields:
        own = next((name for name in _VENDOR_BODIES if isinstance(fields.get(name), dict)), None)
        if own is not None:
            raise LineError(
                f"the request is in `{own}`, but the line has a `url`: remove `url` and `method`, "
                f"or call `{own}` `body`",
                line=raw.number,
                code="missing_required_parameter",
                param="body",
                custom_id=known_id,
            )
    for name, kind in (("custom_id", str), ("url", str), ("body", dict)):
        if not isinstance(fields.get(name), kind):
            raise _bad_field(raw.number, fields, name, _JSON_TYPES[kind], known_id)
    method = fields.get("method", METHOD)
    if not isinstance(method, str):
        raise LineError(
            f"`method` must be a string, not {name_of_type(method)}",
            line=raw.number,
            code=INVALID_METHOD,
            param="method",
            custom_id=known_id,
        )


def _parse_object(raw: RawLine, *, in_slices: bool) -> dict[str, Any]:
    if raw.overlong is not None:
        raise LineError(
            f"too long: {raw.overlong.num_bytes:,} bytes, and the limit is {raw.overlong.limit:,}; "
            "split the request or raise the limit",
            line=raw.number,
        )
    try:
        # Several files with such marks may have been joined.
        data = raw.data.removeprefix(BOM)
        value = load_json(data, cache_strings="keys", in_slices=in_slices)
    except TooManyValues as exc:
        raise LineError(f"too large: it {exc}; split the request", line=raw.number) from exc
    except ValueError as exc:
        raise LineError(_why_not_json(raw.data, str(exc)), line=raw.number) from exc
    if not isinstance(value, dict):
        raise LineError(
            f"not a JSON object but {name_of_type(value)}: write one object per line, with "
            "`custom_id`, `url` and `body`",
            line=raw.number,
        )
    return value


def _bad_field(
    number: int, fields: dict[str, Any], name: str, kind: str, custom_id: str | None
) -> LineError:
    value = fields.get(name)
    if value is None:
        message = f"`{name}` is required and must be {kind}"
    else:
        message = f"`{name}` must be {kind}, not {name_of_type(value)}"
    code = "invalid_url" if name == "url" and value is not None else "missing_required_parameter"
    return LineError(message, line=number, code=code, param=name, custom_id=custom_id)


def name_of_type(value: object) -> str:
    """Return the name of a JSON value's type, with its article."""
    return _JSON_TYPES.get(type(value), "null")


def _why_not_json(data: bytes, reason: str) -> str:
    """Describe the fault for someone who has the file open, and say what to do."""
    reason, column = _split_position(reason)
    if data.startswith(_UTF16_BOMS):
        return "UTF-16: save the file as UTF-8"
    if b"\0" in data:
        return f"a NUL byte at byte {data.index(0) + 1}: write it as \\u0000 or remove it"
    try:
        data.decode()
    except UnicodeDecodeError as exc:
        return f"not UTF-8: 0x{data[exc.start]:02x} at byte {exc.start + 1}; save the file as UTF-8"
    if "recursion limit" in reason:
        return f"nested too deeply at byte {column}: the limit is 200 levels"
    if "control character" in reason:
        return f"an unescaped control character at byte {column}: escape it, as in \\n or \\u0001"
    if "hex escape" in reason:
        return (
            f"an invalid \\u escape before byte {column}: it needs four hex digits, and a "
            "surrogate (d800 to dfff) needs its other half next to it"
        )
    if "trailing characters" in reason and (place := data.find(BOM, 1)) > 0:
        return (
            f"a byte order mark at byte {place + 1}, where files were joined: "
            "put a line break before it"
        )
    if "trailing characters" in reason and data.rstrip(JSON_WHITE_SPACE).endswith(b","):
        return f"a comma after the object, at byte {column}: remove it"
    return f"not JSON: {reason} at byte {column}"


def _split_position(reason: str) -> tuple[str, str]:
    match = re.fullmatch(r"(.*) at line \d+ column (\d+)", reason, re.DOTALL)
    return (match[1], match[2]) if match else (reason, "?")
