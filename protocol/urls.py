"""Media URLs of requests: http(s) URLs and S3 objects to fetch, and base64 data URLs."""

from __future__ import annotations

import re
from binascii import Error as NotBase64
from binascii import a2b_base64
from typing import NamedTuple

from tidemill.net.public_addresses import is_internal_host
from tidemill.net.ssrf_guard import UrlRefused, parse_url

MAX_INLINE_BYTES = 25 * 2**20
"""Maximum size of data in a data URL; fetched media may have a different limit."""

_PIECE_CHARS = 2**18
_HEAD_CHARS = 128

_DATA = "data:"
_DATA_URL = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
_DATA_FORM = "must have the form `data:<type>;base64,<data>` for a data URL"
_FORMS = (
    "must be an http://, https:// or s3:// URL, or a base64 data URL: paths of files are read only"
    " in tables of `tidemill run`, `submit` and `answer_table`"
)

_OBJECT = "s3://"
_OBJECT_FORM = "must have the form `s3://bucket/key`"
_MIN_BUCKET_CHARS = 2  # of a store that is not AWS's
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}", re.ASCII)
_MAX_KEY_BYTES = 1024


class ObjectUrl(NamedTuple):
    """The bucket and the key of an S3 object."""

    bucket: str
    key: str


def is_object(url: str) -> bool:
    """Say whether a URL names an S3 object."""
    return url[: len(_OBJECT)].lower() == _OBJECT


def parse_object_url(url: str) -> ObjectUrl:
    """Return the bucket and the key of an `s3://` URL; raises ValueError.

    The key is used as written: nothing is decoded. Keys with `.` or `..` as a folder are invalid,
    because some stores resolve them.
    """
    bucket, _, key = url[len(_OBJECT) :].partition("/")
    if 0 < len(bucket) < _MIN_BUCKET_CHARS:
        raise ValueError(f"{_OBJECT_FORM}: the bucket name is too short")
    if not _BUCKET.fullmatch(bucket) or not key or key.endswith("/"):
        raise ValueError(_OBJECT_FORM)
    if len(key.encode("utf-8", "surrogatepass")) > _MAX_KEY_BYTES or not key.isprintable():
        raise ValueError(f"{_OBJECT_FORM}, with a printable key of up to {_MAX_KEY_BYTES:,} bytes")
    if not {".", ".."}.isdisjoint(key.split("/")):
        raise ValueError(f"{_OBJECT_FORM}, without `.` or `..` as a folder")
    return ObjectUrl(bucket, key)


def is_inline(url: str) -> bool:
    """Say whether a URL is a data URL."""
    return url[: len(_DATA)].lower() == _DATA


def inline_bytes(url: str, what: str) -> bytes | None:
    """Return the data of a data URL, or None for any other URL.

    Raises ValueError if it is malformed or above `MAX_INLINE_BYTES`; `what` names the data in the
    message.
    """
    if not is_inline(url):
        return None
    head = _DATA_URL.match(url)
    if head is None:
        raise ValueError(_DATA_FORM)
    # Four characters encode three bytes.
    if (len(url) - head.end()) * 3 // 4 > MAX_INLINE_BYTES + 2:
        raise ValueError(too_large(what, MAX_INLINE_BYTES))
    try:
        return _decoded(url, head.end())
    except (NotBase64, ValueError):
        raise ValueError("has no valid base64 after `base64,`") from None


def inline_head(url: str) -> bytes:
    """Return the first bytes of a valid data URL, some dozens unless it is short."""
    start = url.find(",") + 1
    text = "".join(url[start : start + _HEAD_CHARS].split())
    return a2b_base64(text[: len(text) - len(text) % 4])


def _decoded(text: str, start: int) -> bytes:
    """Return decoded base64 text from `start` on, ignoring whitespace.

    It is decoded in pieces, so that the GIL is held for one piece at a time.
    """
    pieces, rest, is_padded = list[bytes](), "", False
    for at in range(start, len(text), _PIECE_CHARS):
        rest += "".join(text[at : at + _PIECE_CHARS].split())
        if is_padded and rest:
            raise ValueError("there is text after the padding")
        whole = len(rest) - len(rest) % 4
        is_padded = is_padded or rest[:whole].endswith("=")
        pieces.append(a2b_base64(rest[:whole], strict_mode=True))
        rest = rest[whole:]
    if rest:
        raise ValueError("the end is missing")
    return b"".join(pieces)


def too_large(what: str, max_bytes: int) -> str:
    """Return the message for data above its size limit."""
    return f"refers to {what} larger than {max_bytes:,} bytes"


def checked_url(url: str, what: str) -> str:
    """Return the URL, or raise ValueError if no fetch could succeed; messages do not quote it.

    `what` names the data in messages.
    """
    if inline_bytes(url, what) is not None:
        return url
    if is_object(url):
        parse_object_url(url)
        return url
    if not url.lower().startswith(("http://", "https://")):
        raise ValueError(_FORMS)
    try:
        host = parse_url(url, ("https", "http")).host
    except UrlRefused as exc:
        raise ValueError(f"cannot be fetched: {exc}") from exc
    if is_internal_host(host):
        raise ValueError(f"cannot be fetched: {host} is not a public host")
    return url
