"""The task of a model, by its files on this machine, before anything is loaded.

Nothing here imports a model library or contacts a hub.
"""

from __future__ import annotations

import json
from dataclasses import replace

from tidemill.protocol.contract import EngineError
from tidemill.protocol.moderation import are_named
from tidemill.protocol.routes import (
    CHAT_COMPLETIONS,
    CLASSIFY,
    COHERE_EMBED,
    COMPLETIONS,
    DECISIONS,
    EMBEDDINGS,
    GENERATIVE_SCORING,
    MODERATIONS,
    POOLING,
    RERANK,
    RESPONSES,
    SCORE,
    SYSTEM_ONE,
    TRANSCRIPTIONS,
    TRANSLATIONS,
    Route,
)

from ..config import EngineConfig
from ..parsers.guards import guard_format
from ..storage.gguf.unpacked import description_folder
from ..storage.hub import config_of, local_source
from ..storage.model_digest import template_texts
from .encoders.pooling_config import PoolingTask, first_class, read_pooling_config
from .families.refused_types import REFUSED_TYPES, SPEECH, use_of_head

_SPEECH_TYPE = "whisper"
_POOLED: dict[PoolingTask, list[Route]] = {
    "embed": [EMBEDDINGS, COHERE_EMBED, SCORE, RERANK, POOLING],
    "embed_sparse": [POOLING],
    "token_embed": [SCORE, RERANK, POOLING],
    "score": [SCORE, RERANK],
    "classify": [],
    "token_classify": [CLASSIFY, POOLING],
    "decide": [DECISIONS, SYSTEM_ONE],
}


def endpoints_of(config: EngineConfig, chat_template: str | None = None) -> tuple[str, ...] | None:
    """Return the endpoints that `config.model` supports; None if its files do not show them.

    The text of a `chat_template` replaces the model's own.
    """
    source = local_source(config.model)
    if source is None:
        return None
    try:
        folder = description_folder(source) if source.is_file() else source
        description = json.loads(config_of(folder).read_bytes())
        if not isinstance(description, dict):
            return None
        if description.get("model_type") in REFUSED_TYPES[SPEECH]:  # the load reports it
            return None
        pooled = read_pooling_config(description, replace(config, model=str(folder)))
    except (OSError, ValueError, RecursionError, EngineError):  # the load reports it
        return None
    if pooled is not None:
        routes = _POOLED[pooled.task]
        if pooled.labels and pooled.task != "token_classify":
            moderations = [MODERATIONS] if are_named(pooled.labels) else []
            routes = [*routes, CLASSIFY, *moderations, POOLING]
    elif description.get("model_type") == _SPEECH_TYPE:
        routes = [TRANSCRIPTIONS, TRANSLATIONS]
    elif use_of_head(first_class(description)) is not None:
        return None  # the load reports it
    else:
        routes = [
            *(CHAT_COMPLETIONS, RESPONSES, COMPLETIONS),
            *(GENERATIVE_SCORING, DECISIONS, SYSTEM_ONE),
        ]
        templates = template_texts(source) if chat_template is None else [chat_template]
        routes += [MODERATIONS] if guard_format(templates) is not None else []
    return tuple(route.name for route in routes)
