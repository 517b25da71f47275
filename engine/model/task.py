"""The task of a model by the files that are on this machine: known before anything is loaded.

Nothing here imports a model library or asks a hub.
"""

from __future__ import annotations

import json
from dataclasses import replace

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.hub import local_folder
from engine.model.encoders.description import describe
from engine.protocol.routes import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    EMBEDDINGS,
    RERANK,
    SCORE,
    TRANSCRIPTIONS,
    TRANSLATIONS,
)

_CONFIG = "config.json"
_SPEECH_TYPE = "whisper"


def endpoints_of(config: EngineConfig) -> tuple[str, ...] | None:
    """Return the endpoints that `config.model` answers; None where its files do not tell."""
    folder = local_folder(config.model)
    if folder is None:
        return None
    try:
        description = json.loads((folder / _CONFIG).read_bytes())
        if not isinstance(description, dict):
            return None
        pooled = describe(description, replace(config, model=str(folder)))
    except (OSError, ValueError, RecursionError, EngineError):  # told by whoever loads it
        return None
    if pooled is not None:
        routes = [EMBEDDINGS, SCORE, RERANK] if pooled.task == "embed" else [SCORE, RERANK]
    elif description.get("model_type") == _SPEECH_TYPE:
        routes = [TRANSCRIPTIONS, TRANSLATIONS]
    else:
        routes = [CHAT_COMPLETIONS, COMPLETIONS]
    return tuple(route.name for route in routes)
