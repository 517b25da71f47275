"""What a client may ask of a batch: by the user metadata of an upload, or by an API request.

Both have the same rules. An upload spells the names with dashes, and whatever else stands in its
user metadata becomes the batch's `metadata`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from email.errors import MessageError
from email.header import decode_header, make_header
from typing import Any, Final
from urllib.parse import urlsplit

from handler.batch.model import OnInvalidLine, Options
from handler.errors import InvalidOption

DEFAULT_WINDOW: Final = "24h"
MIN_WINDOW_SECONDS: Final = 30 * 60
MAX_WINDOW_SECONDS: Final = 14 * 24 * 3600
MAX_METADATA_PAIRS: Final = 16
MAX_METADATA_KEY_CHARS: Final = 64
MAX_METADATA_VALUE_CHARS: Final = 512
MAX_URL_CHARS: Final = 8192
MIN_EXPIRY_SECONDS: Final = 3600
MAX_EXPIRY_SECONDS: Final = 30 * 24 * 3600

_UNIT_SECONDS = {"m": 60, "h": 3600, "d": 24 * 3600}
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([mhd])", re.ASCII)
_URL_CHARS = re.compile(r"[!-\[\]-~]+", re.ASCII)  # printable, no space and no backslash
_URLS = ("output_url", "error_url", "webhook_url")
_NAMES = ("completion_window", *_URLS, "on_invalid_line")


def parse_options(
    user_metadata: Mapping[str, str], default_window: str = DEFAULT_WINDOW
) -> Options:
    """Return what the user metadata of an upload asks for; raises InvalidOption.

    `default_window` is the completion window of one that names none. Values may be encoded as
    RFC 2047 says, which is how S3 gives back what is not ASCII.
    """
    values: dict[str, Any] = {name.lower(): _decode(text) for name, text in user_metadata.items()}
    names = {name: name.replace("_", "-") for name in _NAMES}
    asked = {name: values.pop(spelled, None) for name, spelled in names.items()}
    if asked["completion_window"] is None:
        asked["completion_window"] = default_window
    return _check(asked, names, values)


def options_of_request(fields: Mapping[str, Any]) -> Options:
    """Return what the fields of an API request ask for; raises InvalidOption.

    A field that is null counts as not there; fields with other names are not looked at.
    """
    asked = {name: fields.get(name) for name in _NAMES}
    options = _check(asked, {name: name for name in _NAMES}, fields.get("metadata"))
    expiry = _check_expiry(fields.get("output_expires_after"))
    return replace(options, output_expires_seconds=expiry)


def window_seconds(window: object, *, param: str = "completion_window") -> int:
    """Return the seconds of a window such as `30m`, `24h` or `14d`; raises InvalidOption."""
    match = _WINDOW.fullmatch(window) if isinstance(window, str) else None
    seconds = int(match[1]) * _UNIT_SECONDS[match[2]] if match else 0
    if not MIN_WINDOW_SECONDS <= seconds <= MAX_WINDOW_SECONDS:
        raise InvalidOption(
            f"`{param}` must be a number of minutes, hours or days from 30m to 14d, such as 24h; "
            f"got {_shown(window)}.",
            param=param,
        )
    return seconds


def check_url(value: object, param: str) -> str:
    """Return an https url; raises InvalidOption.

    Only its words are looked at; whether its host may be dialled is seen when it is.
    """
    problem = _problem_of_url(value)
    if problem is not None or not isinstance(value, str):
        # The url itself is never shown: a presigned one is a secret.
        raise InvalidOption(f"`{param}` must be an https url; {problem}.", param=param)
    return value


def _check(asked: Mapping[str, Any], names: Mapping[str, str], metadata: object) -> Options:
    window = DEFAULT_WINDOW if asked["completion_window"] is None else asked["completion_window"]
    window_seconds(window, param=names["completion_window"])
    urls: dict[str, Any] = {
        name: None if asked[name] is None else check_url(asked[name], names[name]) for name in _URLS
    }
    return Options(
        completion_window=window,
        **urls,
        on_invalid_line=_check_choice(asked["on_invalid_line"], names["on_invalid_line"]),
        metadata=_check_metadata(metadata),
    )


def _check_choice(value: object, param: str) -> OnInvalidLine:
    if value is None or value == "fail":
        return "fail"
    if value == "skip":
        return "skip"
    raise InvalidOption(f'`{param}` must be "fail" or "skip"; got {_shown(value)}.', param=param)


def _problem_of_url(value: object) -> str | None:
    if not isinstance(value, str):
        return "this one is no string"
    if len(value) > MAX_URL_CHARS:
        return f"this one has {len(value):,} characters, and the limit is {MAX_URL_CHARS:,}"
    if not _URL_CHARS.fullmatch(value):
        return "spaces, backslashes and what is not ASCII must be percent-encoded"
    try:
        parts = urlsplit(value)
        host, port = parts.hostname, parts.port
    except ValueError:
        return "this one cannot be read"
    if parts.scheme != "https":
        return "this one does not begin with https://"
    if "@" in parts.netloc:
        return "a user name or password in it is not accepted"
    if not host or port == 0:
        return "this one names no host"
    return None


def _check_expiry(policy: object) -> int | None:
    param = "output_expires_after"
    if policy is None:
        return None
    if not isinstance(policy, Mapping) or policy.get("anchor") != "created_at":
        raise InvalidOption(
            f'`{param}` must be an object whose `anchor` is "created_at".', param=param
        )
    seconds = policy.get("seconds")
    if type(seconds) is not int or not MIN_EXPIRY_SECONDS <= seconds <= MAX_EXPIRY_SECONDS:
        raise InvalidOption(
            f"`{param}.seconds` must be a number from {MIN_EXPIRY_SECONDS:,} to "
            f"{MAX_EXPIRY_SECONDS:,}; got {_shown(seconds)}.",
            param=f"{param}.seconds",
        )
    return seconds


def _check_metadata(metadata: object) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, Mapping):
        raise _bad_metadata("must be an object of strings")
    if len(metadata) > MAX_METADATA_PAIRS:
        raise _bad_metadata(f"has {len(metadata)} pairs; the limit is {MAX_METADATA_PAIRS}")
    for name, value in metadata.items():
        if not (_is_text(name) and _is_text(value)):
            raise _bad_metadata(f"must hold strings only; see {_shown(name)}")
        if not name:
            raise _bad_metadata("has an empty key")  # which DynamoDB does not take
        if len(name) > MAX_METADATA_KEY_CHARS:
            raise _bad_metadata(
                f"has a key of {len(name)} characters; the limit is {MAX_METADATA_KEY_CHARS}"
            )
        if len(value) > MAX_METADATA_VALUE_CHARS:
            raise _bad_metadata(
                f"has {len(value)} characters at {_shown(name)}; "
                f"the limit is {MAX_METADATA_VALUE_CHARS}"
            )
    return dict(metadata)


def _bad_metadata(words: str) -> InvalidOption:
    return InvalidOption(f"`metadata` {words}.", param="metadata")


def _is_text(value: object) -> bool:
    """Say whether it is a string that can be stored: a lone surrogate cannot."""
    try:
        return isinstance(value, str) and bool(value.encode() or True)
    except UnicodeEncodeError:
        return False


def _decode(text: str) -> str:
    """Return what an RFC 2047 value means; one that is broken is taken as it stands."""
    try:
        return str(make_header(decode_header(text)))
    except (MessageError, LookupError, UnicodeError, ValueError):
        return text


def _shown(value: object) -> str:
    return ascii(value)[:80]
