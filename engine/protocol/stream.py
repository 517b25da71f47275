"""Whether a body asks for a stream, which a batch cannot give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.protocol.errors import RequestError
from engine.protocol.validation import shown

STREAM_MODE = "Request must not be sent in stream mode"
STREAM_NOT_SUPPORTED = "stream_not_supported"

# What vLLM's validation takes for true and false; a JSON boolean is what clients should send.
_TRUE_WORDS = frozenset({"true", "t", "yes", "y", "on", "1"})
_FALSE_WORDS = frozenset({"false", "f", "no", "n", "off", "0"})
_WORD_OF = {0: "0", 1: "1"}  # False and True are among the keys: they equal 0 and 1


def is_stream(body: Mapping[str, Any]) -> bool:
    """Say whether a body asks for a stream, in any word that means yes."""
    return _word(body) in _TRUE_WORDS


def refuse_stream(body: Mapping[str, Any]) -> None:
    """Raise `RequestError` for a body that asks for a stream, or whose `stream` is neither."""
    if is_stream(body):
        raise RequestError(STREAM_MODE, param="stream", code=STREAM_NOT_SUPPORTED)
    value = body.get("stream")
    if value is not None and _word(body) not in _FALSE_WORDS:
        raise RequestError(f"`stream` must be false; got {shown(value)}.", param="stream")


def _word(body: Mapping[str, Any]) -> str | None:
    value = body.get("stream")
    if isinstance(value, str):
        return value.lower()
    return _WORD_OF.get(value) if isinstance(value, int) else None
