"""Engines of this process: one for equal options, until nothing refers to it or it has died."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

from ..engine import Engine

_lock = threading.Lock()
_engines: WeakValueDictionary[tuple[int, str], Engine] = WeakValueDictionary()


def process_engine(options: Mapping[str, Any]) -> Engine:
    """Return the engine of these options, started if there is none; raises TidemillError."""
    key = os.getpid(), json.dumps(options, sort_keys=True)
    with _lock:
        engine = _engines.get(key)
        if engine is None:
            engine = _engines[key] = Engine(**options)
    return engine


def drop_engine(engine: Engine) -> None:
    """Let the next that asks have another engine: this one has died."""
    with _lock:
        for key, found in list(_engines.items()):
            if found is engine:
                del _engines[key]
