"""Errors that end an engine; those of a single request are in `protocol.errors`."""

from __future__ import annotations

from tidemill.protocol.contract import EngineError

MAX_WORDS_CHARS = 300


class ModelRefused(EngineError):
    """A model that would not run, or would run incorrectly; the message names it and the reason."""

    code = "model_refused"


class TransformersRefused(ModelRefused):
    """A model whose class in transformers cannot run here, regardless of its files."""


class OutOfCacheMemory(EngineError):
    """The memory does not fit a KV cache of even one page per sequence."""

    code = "out_of_cache_memory"


class DeviceFailed(EngineError):
    """The device fails for every request: no request is to blame, and none can be answered."""

    code = "device_failed"


class MachineFailed(DeviceFailed):
    """The machine fails in a way that no request can cause: none of them is a suspect."""

    code = "machine_failed"


class RankFailed(EngineError):
    """One of the processes that share a model has failed, so all of them are unusable."""

    code = "rank_failed"


class EngineClosed(EngineError):
    """The engine was closed while a request waited or ran."""

    code = "engine_closed"


def first_line_of(exc: BaseException) -> str:
    """Return the message of another library's exception, in one line."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    message = lines[0] if lines else type(exc).__name__
    if isinstance(exc, KeyError):  # its message is the key alone
        message = f"the key {message} is missing"
    # "Validation error for field 'hidden_size':" continues on the next line.
    if message.endswith(":") and len(lines) > 1:
        message = f"{message} {lines[1]}"
    return message if len(message) <= MAX_WORDS_CHARS else f"{message[:MAX_WORDS_CHARS]}…"
