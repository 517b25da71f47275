"""Errors that end an engine; those of a single request are in `protocol.errors`."""

from __future__ import annotations

from tidemill.protocol.contract import EngineError

MAX_WORDS_CHARS = 300


class ModelRefused(EngineError):
    """A model that would not run, or silently run wrong; the message names it and says why."""

    code = "model_refused"


class TransformersRefused(ModelRefused):
    """A model whose class in transformers cannot run here, whatever files it has."""


class OutOfCacheMemory(EngineError):
    """There is no room for a KV cache of even one page a sequence."""

    code = "out_of_cache_memory"


class DeviceFailed(EngineError):
    """The device fails, whatever it is asked: no request is to blame, and none can be answered."""

    code = "device_failed"


class MachineFailed(DeviceFailed):
    """The machine fails in a way that no request can be the cause of: none of them is a suspect."""

    code = "machine_failed"


class RankFailed(EngineError):
    """One of the processes that share a model has failed, and with it all of them."""

    code = "rank_failed"


class EngineClosed(EngineError):
    """The engine was closed while a request waited or ran."""

    code = "engine_closed"


def first_line_of(exc: BaseException) -> str:
    """Return what an exception of another library says, in one line."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    said = lines[0] if lines else type(exc).__name__
    # "Validation error for field 'hidden_size':" goes on in the next line.
    if said.endswith(":") and len(lines) > 1:
        said = f"{said} {lines[1]}"
    return said if len(said) <= MAX_WORDS_CHARS else f"{said[:MAX_WORDS_CHARS]}…"
