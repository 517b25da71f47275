"""Rows: the one result of each line, printed in either dialect and read back for a resume.

A row is one line of strict JSON in UTF-8: a number that JSON cannot represent becomes null, and
every character that a reader might treat as a line end is escaped. It contains nothing random and
no time, so the same line and reply print the same bytes in any run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from pydantic_core import PydanticSerializationError, from_json, to_json

from tidemill.protocol.errors import ProtocolError
from tidemill.protocol.json_printing import print_json

from .lines import INVALID_CELL, Line, LineError

Dialect = Literal["openai", "vllm"]
_ROW_ID: Final = "batch_req_"
_ROW_END: Final = b'},"error":null}\n'
RAISE_LIMIT: Final = "raise max_tokens (max_output_tokens in responses)"
"""Advice for truncated answers."""

_TRUNCATED: Final = re.compile(rb'reason":"(?:length|max_output_tokens)"')  # starts as few others

SEPARATOR_ESCAPES: Final = {ord(char): f"\\u{ord(char):04x}" for char in "\u0085\u2028\u2029"}
"""Escapes of the characters that other readers treat as line ends, for `str.translate`."""

_SEPARATORS: Final = [
    (chr(code).encode(), text.encode()) for code, text in SEPARATOR_ESCAPES.items()
]


class RowError(ProtocolError):
    """Bytes that are not a row, or a reply that cannot be printed as one."""

    code = "invalid_row"


class RowHead(NamedTuple):
    """Header fields of a finished row; `status_code` is None if its line never ran.

    If it `is_truncated`, its answer reached the token limit.
    """

    row_id: str
    custom_id: str | None
    status_code: int | None
    created: int | None
    is_truncated: bool = False


def escape_separators(data: bytes) -> bytes:
    r"""Return JSON with U+0085, U+2028 and U+2029 escaped, as in `\u2028`.

    JSON permits them in strings, but `str.splitlines`, httpx's `iter_lines` and Node's readline end
    a line at them. All other bytes are unchanged.
    """
    if not data.isascii():
        for char, escape in _SEPARATORS:
            if char[0] in data and char[-1] in data:  # ten times as fast as a search for all bytes
                data = data.replace(char, escape)
    return data


def row_id_of(digest: str) -> str:
    """Return the ID of the row of the line with this digest."""
    return f"{_ROW_ID}{digest}"


def print_reply(
    line: Line,
    status_code: int,
    body: dict[str, Any],
    *,
    dialect: Dialect = "openai",
    bare_message: bool = False,
    is_long: bool = False,
) -> bytes:
    """Return the row of an answered line, newline included.

    `body` is `{"error": …}` unless the status is 200. With `bare_message` vLLM's dialect prints
    only the error's message. A row that `is_long` is printed in parts. Raises RowError for a body
    that JSON cannot represent.
    """
    error: object = None
    shown: dict[str, Any] | None = body
    if dialect == "vllm" and status_code != 200:
        error = body["error"]["message"] if bare_message else body
        shown = None
    response = {"status_code": status_code, "request_id": line.request_id, "body": shown}
    return _print(line.digest, line.custom_id, response, error, is_long=is_long)


def print_cached(line: Line, body: bytes) -> bytes:
    """Return the row of a line with a successful, already printed reply."""
    head = escape_separators(to_json({"id": row_id_of(line.digest), "custom_id": line.custom_id}))
    response = b'"response":{"status_code":200,"request_id":"%s","body":' % line.request_id.encode()
    return b"%s,%s%s%s" % (head[:-1], response, escape_separators(body), _ROW_END)


def reply_body(row: bytes) -> tuple[str, bytes]:
    """Return the digest of a successful row's line, and its printed reply."""
    row_id = row.split(b'"', 4)[3].decode()
    if row.endswith(_ROW_END):
        _, _, body = row.partition(b'"body":')  # quotes inside strings are escaped
        body = body.removesuffix(_ROW_END)
    else:  # it has echoed fields
        body = to_json(from_json(row)["response"]["body"])
    return row_id.removeprefix(_ROW_ID), body


def print_not_run(digest: str, custom_id: str | None, *, code: str, message: str) -> bytes:
    """Return the row of a line that never ran, newline included."""
    return _print(digest, custom_id, None, {"code": code, "message": message})


def print_malformed(digest: str, error: LineError) -> bytes:
    """Return the row of a line that is not a request, newline included."""
    unit = "Row" if error.code == INVALID_CELL else "Line"
    error_object = {
        "code": "invalid_json_line",
        "message": f"{unit} {error.line}: {error.message}",
        "param": error.param,
        "line": error.line,
    }
    return _print(digest, error.custom_id, None, error_object)


def _print(
    digest: str, custom_id: str | None, response: object, error: object, *, is_long: bool = False
) -> bytes:
    row = {
        "id": _ROW_ID + digest,
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    try:
        data = (print_json if is_long else to_json)(row, inf_nan_mode="null")
        return (data if data.isascii() else escape_separators(data)) + b"\n"
    except (PydanticSerializationError, ValueError) as exc:
        raise RowError(f"the reply cannot be printed as JSON: {exc}") from exc


def parse_row_head(data: bytes) -> RowHead:
    """Return the header fields of a printed row; raises RowError for other bytes."""
    try:
        row = from_json(data, cache_strings="keys")
        response = row["response"]
        head = RowHead(row["id"], row["custom_id"], None, None)
        if response is not None:
            body = response["body"] or {}
            head = head._replace(
                status_code=response["status_code"],
                created=body.get("created", body.get("created_at")),
                is_truncated=has_truncated_answer(body),
            )
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise RowError("not a row of a batch output") from exc
    return head


def is_success(row: bytes) -> bool:
    """Return whether a printed row is that of a successful request."""
    # Quotes inside strings are escaped, so a custom ID cannot contain this; an echoed field can.
    return row.startswith(b',"response":{"status_code":200,', row.find(b',"response":'))


def count_truncated(rows: Sequence[bytes]) -> int:
    """Return the number of printed rows with an answer that reached its token limit."""
    if _TRUNCATED.search(b"".join(rows)) is None:  # one search instead of one for each row
        return 0
    return sum(map(is_truncated, rows))


def is_truncated(row: bytes) -> bool:
    """Return whether an answer of a printed row reached its token limit."""
    if _TRUNCATED.search(row) is None:  # quotes within a string are escaped, so few rows are parsed
        return False
    try:
        return parse_row_head(row).is_truncated
    except RowError:
        return False


def has_truncated_answer(body: Mapping[str, Any]) -> bool:
    """Return whether an answer of a reply reached its token limit."""
    details = body.get("incomplete_details")
    if isinstance(details, dict) and details.get("reason") == "max_output_tokens":
        return True
    choices = body.get("choices")
    return isinstance(choices, list) and any(
        isinstance(choice, dict) and choice.get("finish_reason") == "length" for choice in choices
    )


def row_error(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return a row's error in either dialect, with its message; None for a success."""
    response, error = row.get("response"), row.get("error")
    if isinstance(response, dict) and isinstance(response.get("body"), dict):
        error = error or response["body"].get("error")
    if isinstance(error, dict):
        inner = error.get("error")
        return inner if isinstance(inner, dict) else error
    return None if error is None else {"message": error}


def row_error_message(row: Mapping[str, Any]) -> str | None:
    """Return the message of a row's error in either dialect; None for a success."""
    message = (row_error(row) or {}).get("message")
    return None if message is None else str(message)
