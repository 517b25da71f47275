"""Line pattern: the bytes of a line except its custom ID and the texts of its prompt.

Most lines of a file differ only in these: they are checked and indexed without being parsed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from pydantic_core import from_json

from .body_form import BodyForm
from .line_index import describe

WithDefaults = Callable[[str, dict[str, Any]], dict[str, Any]]
"""Returns the body of a request to a URL, including the defaults of the run."""

_STRING: Final = re.compile(rb'("[^"\\]*+(?:\\.[^"\\]*+)*+")', re.DOTALL)
_ESCAPES: Final = (b"\\\\", b'\\"', b"\\n", b"\\t", b"\\r")
"""Escapes that a prompt's key has, too; the first one precedes those that may follow it."""

_NOT_PLAIN: Final = bytes(range(32)) + b'"\\'
_MAX_BYTES: Final = 2**16
_MAX_GAPS: Final = 16
_SEARCHED_BYTES: Final = 4


class LinePattern:
    """Pattern of valid requests to `url` whose bodies, including defaults, have the same `form`.

    A line that matches is `line_parts` with a JSON string's content in each gap between them. Its
    prompt's key is `key_parts` with the same texts, except that of gap `id_gap`: the custom ID.
    """

    def __init__(
        self,
        url: str,
        form: BodyForm,
        line_parts: Sequence[bytes],
        key_parts: Sequence[bytes],
        id_gap: int,
        *,
        max_tokens: int,
        may_be_empty: bool,
    ) -> None:
        self.form = form
        self.kind = url, form.model
        self.max_tokens = max_tokens
        self._first, *between, self._last = line_parts
        # Searching for the start of a part does not prepare a search for all of it.
        self._between = [(part[:_SEARCHED_BYTES], part, len(part)) for part in between]
        self._key = b"%b".join([part.replace(b"%", b"%%") for part in key_parts])
        self._id_gap = id_gap
        self._may_be_empty = may_be_empty

    def match(self, data: bytes) -> tuple[bytes, bytes] | None:
        """Return the custom ID of a line in UTF-8, and the `prompt_key` of its body.

        Returns None for a line that has to be parsed.
        """
        first, last, texts = self._first, self._last, []
        if not (data.startswith(first) and data.endswith(last)):
            return None
        start, end = len(first), len(data) - len(last)
        for begin, part, num_bytes in self._between:
            stop = data.find(begin, start, end)
            if stop < 0 or not data.startswith(part, stop, end):
                return None
            texts.append(data[start:stop])
            start = stop + num_bytes
        texts.append(data[start:end])
        joined = b" ".join(texts)
        if len(joined.translate(None, _NOT_PLAIN)) < len(joined) and not _has_only_escapes(joined):
            return None
        custom_id = texts.pop(self._id_gap)
        if end < start or b"\\" in custom_id or not (self._may_be_empty or all(texts)):
            return None
        if not joined.isascii() and not _is_utf8(joined):
            return None
        return custom_id, self._key % tuple(texts)


def _has_only_escapes(texts: bytes) -> bool:
    """Return whether `_ESCAPES` are the only characters that are not plain."""
    for escape in _ESCAPES:
        texts = texts.replace(escape, b" ")
    return len(texts.translate(None, _NOT_PLAIN)) == len(texts)


def _is_utf8(texts: bytes) -> bool:
    try:
        texts.decode()
    except UnicodeDecodeError:
        return False
    return True


def find_pattern(
    data: bytes, other: bytes, form: BodyForm, with_defaults: WithDefaults
) -> LinePattern | None:
    """Return the pattern of two lines that are requests of one form; None without any.

    Its gaps are the strings that differ. Parsing a line with a mark in each gap shows its field.
    """
    if max(len(data), len(other)) > _MAX_BYTES or b"\\u" in data:
        return None
    parts, others = _STRING.split(data), _STRING.split(other)
    if parts[::2] != others[::2]:
        return None
    gaps = [place for place in range(1, len(parts), 2) if parts[place] != others[place]]
    are_keys = any(parts[place + 1].lstrip().startswith(b":") for place in gaps)
    if are_keys or not 0 < len(gaps) <= _MAX_GAPS:
        return None
    mark = b"@"
    while mark in data:
        mark += b"@"
    for number, place in enumerate(gaps):
        parts[place] = b'"%b%d"' % (mark, number)
    marked = b"".join(parts)
    custom_id, url, body = _request_of(marked, with_defaults)
    roles = form.roles(body)
    if roles not in form.valid_roles or roles != form.roles(_request_of(data, with_defaults)[2]):
        return None
    gap = re.compile(b'(?<=")%b([0-9]+)(?=")' % mark)
    key_parts = gap.split(form.prompt_key(body))
    numbers = [int(number) for number in key_parts[1::2]]
    id_gap = next((number for number in range(len(gaps)) if number not in numbers), 0)
    numbers.insert(id_gap, id_gap)
    is_id = custom_id.encode() == b"%b%d" % (mark, id_gap)
    if not is_id or numbers != [*range(len(gaps))]:
        return None
    return LinePattern(
        url,
        form,
        gap.split(marked)[::2],
        key_parts[::2],
        id_gap,
        max_tokens=describe(body, form)[1],
        may_be_empty="messages" in body,
    )


def _request_of(data: bytes, with_defaults: WithDefaults) -> tuple[str, str, dict[str, Any]]:
    """Return the custom ID, the URL and the body with defaults of a line's request."""
    fields = from_json(data)
    return fields["custom_id"], fields["url"], with_defaults(fields["url"], fields["body"])
