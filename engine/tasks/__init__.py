"""The supported kinds of models. Each is one file and one line here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import EngineConfig
from ..storage.hub import config_of
from .generation import GenerationTask
from .pooling import PoolingTask
from .speech import SpeechTask
from .task import Task

__all__ = ["TASKS", "Task", "find_task"]

TASKS: tuple[Task, ...] = (PoolingTask(), SpeechTask(), GenerationTask())
"""In the order of checks; the last one matches every model, and may refuse to load it."""


def find_task(folder: Path | None, config: EngineConfig, tasks: Sequence[Task] = TASKS) -> Task:
    """Return the kind of `config.model`; `folder` contains its config.json.

    It is the first that matches; raises `EngineError` if that cannot be determined.
    """
    description = _description(folder)
    return next(task for task in tasks if task.matches(description, config))


def _description(folder: Path | None) -> Mapping[str, Any]:
    """Return the raw config.json, empty if it is unreadable, which `load` reports."""
    if folder is None:
        return {}
    try:
        description = json.loads(config_of(folder).read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return description if isinstance(description, dict) else {}
