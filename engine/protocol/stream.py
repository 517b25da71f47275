"""Whether a body asks for a stream, which a batch cannot give, and what it asks of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.protocol.errors import RequestError
from engine.protocol.validation import shown

STREAM_MODE = "Request must not be sent in stream mode"
STREAM_NOT_SUPPORTED = "stream_not_supported"

# What vLLM's validation takes for true and false; a JSON boolean is what clients should send.
_TRUE_WORDS = frozenset({"true", "t", "yes", "y", "on", "1"})
_FALSE_WORDS = frozenset({"false", "f", "no", "n", "off", "0"})
_WORD_OF = {0: "0", 1: "1"}  # False and True are among the keys: they equal 0 and 1

_OPTIONS = "stream_options"


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What a stream tells of tokens: all of them at its end, or also so far in each chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


def is_stream(body: Mapping[str, Any]) -> bool:
    """Say whether a body asks for a stream, in any word that means yes."""
    return _word(body) in _TRUE_WORDS


def refuse_stream(body: Mapping[str, Any]) -> None:
    """Raise `RequestError` for a body that asks for a stream, or whose `stream` is neither."""
    if is_stream(body):
        raise RequestError(STREAM_MODE, param="stream", code=STREAM_NOT_SUPPORTED)
    _refuse_other(body, "false")


def stream_options(body: Mapping[str, Any]) -> StreamOptions | None:
    """Return what a body asks of the stream that it asks for; None where it asks for none.

    Raises `RequestError` for a `stream` that is neither yes nor no, and for options that are none.
    """
    if not is_stream(body):
        _refuse_other(body, "true or false")
        return None
    given = body.get(_OPTIONS)
    if given is None:  # in forms vLLM has them side by side
        return _options(body, "stream_")
    if not isinstance(given, dict):
        raise RequestError(f"`{_OPTIONS}` must be an object; got {shown(given)}.", param=_OPTIONS)
    return _options(given, "", f"{_OPTIONS}.")


def no_stream(url: str) -> RequestError:
    """Return the error of a stream at a url whose answers come whole."""
    return RequestError(
        f"{url} answers all at once: leave `stream` out or send false.",
        param="stream",
        code=STREAM_NOT_SUPPORTED,
    )


def _options(given: Mapping[str, Any], prefix: str, holder: str = "") -> StreamOptions:
    """Return the options that stand in an object, called `holder`, under names with a prefix."""
    names = (f"{prefix}include_usage", f"{prefix}continuous_usage_stats")
    return StreamOptions(*(_option(given, name, f"{holder}{name}") for name in names))


def _option(given: Mapping[str, Any], name: str, param: str) -> bool:
    value = given.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise RequestError(f"`{param}` must be true or false; got {shown(value)}.", param=param)


def _refuse_other(body: Mapping[str, Any], wanted: str) -> None:
    value = body.get("stream")
    if value is not None and _word(body) not in _TRUE_WORDS | _FALSE_WORDS:
        raise RequestError(f"`stream` must be {wanted}; got {shown(value)}.", param="stream")


def _word(body: Mapping[str, Any]) -> str | None:
    value = body.get("stream")
    if isinstance(value, str):
        return value.lower()
    return _WORD_OF.get(value) if isinstance(value, int) else None
