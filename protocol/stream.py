"""Streaming: the `stream` and `stream_options` of a body; batches refuse streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import RequestError
from .validation import short_repr

STREAM_MODE = "Request must not be sent in stream mode"
STREAM_NOT_SUPPORTED = "stream_not_supported"

# Words that vLLM's validation accepts; clients should send a JSON boolean.
_TRUE_WORDS = frozenset({"true", "t", "yes", "y", "on", "1"})
_FALSE_WORDS = frozenset({"false", "f", "no", "n", "off", "0"})
_WORD_OF = {0: "0", 1: "1"}  # False and True are among the keys: they equal 0 and 1

_OPTIONS = "stream_options"


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Token usage in a stream: the total at its end, and optionally a running total per chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


def is_stream(body: Mapping[str, Any]) -> bool:
    """Say whether a body requests a stream, by a boolean or a word that means true."""
    return _word(body) in _TRUE_WORDS


def refuse_stream(body: Mapping[str, Any]) -> None:
    """Raise `RequestError` for a body that requests a stream, or has an invalid `stream`."""
    if is_stream(body):
        raise RequestError(STREAM_MODE, param="stream", code=STREAM_NOT_SUPPORTED)
    _refuse_other(body, "false")


def stream_options(body: Mapping[str, Any]) -> StreamOptions | None:
    """Return the stream options of a body; None if it requests no stream.

    Raises `RequestError` for an invalid `stream` or invalid options.
    """
    if not is_stream(body):
        _refuse_other(body, "true or false")
        return None
    given = body.get(_OPTIONS)
    if given is None:  # in forms vLLM has them as separate fields
        return _options(body, "stream_")
    if not isinstance(given, dict):
        raise RequestError(
            f"`{_OPTIONS}` must be an object; got {short_repr(given)}.", param=_OPTIONS
        )
    return _options(given, "", f"{_OPTIONS}.")


def no_stream(url: str) -> RequestError:
    """Return the error for a stream at a URL that does not support streaming."""
    return RequestError(
        f"{url} does not support streaming: remove `stream` or set it to false.",
        param="stream",
        code=STREAM_NOT_SUPPORTED,
    )


def _options(fields: Mapping[str, Any], prefix: str, holder: str = "") -> StreamOptions:
    """Return the options in an object at the path `holder`, with a prefix of their names."""
    names = (f"{prefix}include_usage", f"{prefix}continuous_usage_stats")
    return StreamOptions(*(_option(fields, name, f"{holder}{name}") for name in names))


def _option(options: Mapping[str, Any], name: str, param: str) -> bool:
    value = options.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise RequestError(f"`{param}` must be true or false; got {short_repr(value)}.", param=param)


def _refuse_other(body: Mapping[str, Any], wanted: str) -> None:
    value = body.get("stream")
    if value is not None and _word(body) not in _TRUE_WORDS | _FALSE_WORDS:
        raise RequestError(f"`stream` must be {wanted}; got {short_repr(value)}.", param="stream")


def _word(body: Mapping[str, Any]) -> str | None:
    value = body.get("stream")
    if isinstance(value, str):
        return value.lower()
    return _WORD_OF.get(value) if isinstance(value, int) else None
