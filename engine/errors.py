"""What can end an engine; what a single request can do wrong is `protocol.errors`."""

from __future__ import annotations

from engine.protocol.errors import EngineError

__all__ = ["EngineClosed", "EngineError", "ModelRefused", "OutOfCacheMemory"]


class ModelRefused(EngineError):
    """A model that would not run, or silently run wrong; the message names it and says why."""

    code = "model_refused"


class OutOfCacheMemory(EngineError):
    """There is no room for a KV cache of even one page a sequence."""

    code = "out_of_cache_memory"


class EngineClosed(EngineError):
    """The engine was closed while a request waited or ran."""

    code = "engine_closed"
