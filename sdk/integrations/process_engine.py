"""Engines of this process: one per set of options, as long as it is referenced and alive."""

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
    """Return the engine with these options, starting it if needed; raises TidemillError."""
    key = os.getpid(), json.dumps(options, sort_keys=True)
    with _lock:
        engine = _engines.get(key)
        if engine is None:
            engine = _engines[key] = Engine(**options)
    return engine


def drop_engine(engine: Engine) -> None:
    """Forget an engine that has died, so that the next caller gets a new one."""
    with _lock:
        for key, found in list(_engines.items()):
            if found is engine:
                del _engines[key]
