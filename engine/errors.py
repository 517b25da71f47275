"""What can end an engine; what a single request can do wrong is `protocol.errors`."""

from __future__ import annotations


class EngineError(Exception):
    """The engine cannot be built or cannot go on; the message is for the user."""

    code: str = "engine_error"


class ModelRefused(EngineError):
    """A model that would not run, or silently run wrong; the message names it and says why."""

    code = "model_refused"


class OutOfCacheMemory(EngineError):
    """There is no room for a KV cache of even one page a sequence."""

    code = "out_of_cache_memory"


class EngineClosed(EngineError):
    """The engine was closed while a request waited or ran."""

    code = "engine_closed"
