"""The kinds of models that are served: each is one file, and one line here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.kinds.generation import Generation
from engine.kinds.kind import Kind
from engine.kinds.pooling import PoolingModels
from engine.kinds.speech import Speech

__all__ = ["KINDS", "Kind", "kind_of"]

KINDS: tuple[Kind, ...] = (PoolingModels(), Speech(), Generation())
"""In the order in which they are asked; the last takes every model, and may refuse to load it."""


def kind_of(folder: Path | None, config: EngineConfig, kinds: Sequence[Kind] = KINDS) -> Kind:
    """Return the kind of `config.model`, of which `folder` has the config.json.

    It is the first that takes it; raises `EngineError` where that cannot be told.
    """
    description = _description(folder)
    return next(kind for kind in kinds if kind.takes(description, config))


def _description(folder: Path | None) -> Mapping[str, Any]:
    """Return a config.json as it stands; empty where there is none to read, which `load` tells."""
    if folder is None:
        return {}
    try:
        description = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return description if isinstance(description, dict) else {}
