"""Urls that bring what a request asks about: to be fetched, or with all of it inside."""

from __future__ import annotations

import re
from binascii import Error as NotBase64
from binascii import a2b_base64

from engine.hosts.addresses import UrlRefused, read_url
from engine.hosts.public import is_inside

MAX_INLINE_BYTES = 25 * 2**20
"""So large may be what lies in its line; what is fetched may have another bound."""

_PIECE_CHARS = 2**18

_DATA = "data:"
_DATA_URL = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
_DATA_FORM = "must be `data:<type>;base64,<data>`, if it is a data URL"
_FORMS = "must be an http:// or https:// url, or a base64 data URL"


def is_inline(url: str) -> bool:
    """Say whether a url holds what it names."""
    return url[: len(_DATA)].lower() == _DATA


def inline_bytes(url: str, what: str) -> bytes | None:
    """Return what a data URL holds, or None for any other url.

    Raises ValueError when it cannot be read, or holds more than `MAX_INLINE_BYTES`; `what` the url
    brings.
    """
    if not is_inline(url):
        return None
    head = _DATA_URL.match(url)
    if head is None:
        raise ValueError(_DATA_FORM)
    # Four characters stand for three bytes.
    if (len(url) - head.end()) * 3 // 4 > MAX_INLINE_BYTES + 2:
        raise ValueError(too_large(what, MAX_INLINE_BYTES))
    try:
        return _decoded(url, head.end())
    except (NotBase64, ValueError):
        raise ValueError("holds no base64 behind its `base64,`") from None


def _decoded(text: str, start: int) -> bytes:
    """Return what stands in base64 from a place on, white space left out.

    In pieces: the interpreter's lock is held no longer than one of them takes.
    """
    pieces, rest, is_padded = list[bytes](), "", False
    for at in range(start, len(text), _PIECE_CHARS):
        rest += "".join(text[at : at + _PIECE_CHARS].split())
        if is_padded and rest:
            raise ValueError("nothing may follow what pads the end")
        whole = len(rest) - len(rest) % 4
        is_padded = is_padded or rest[:whole].endswith("=")
        pieces.append(a2b_base64(rest[:whole], strict_mode=True))
        rest = rest[whole:]
    if rest:
        raise ValueError("the end is missing")
    return b"".join(pieces)


def too_large(what: str, max_bytes: int) -> str:
    """Return the words for something that is larger than it may be."""
    return f"names {what} that is larger than {max_bytes:,} bytes"


def checked_url(url: str, what: str) -> str:
    """Return the url; ValueError says what no fetching could change, in words that do not hold it.

    `what` is what the url brings.
    """
    if inline_bytes(url, what) is not None:
        return url
    if not url.lower().startswith(("http://", "https://")):
        raise ValueError(_FORMS)
    try:
        host = read_url(url, ("https", "http")).host
    except UrlRefused as exc:
        raise ValueError(f"cannot be fetched: {exc}") from exc
    if is_inside(host):
        raise ValueError(f"cannot be fetched: {host} is not a public host")
    return url
