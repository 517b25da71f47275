"""What the routes of a server share."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

from engine.contract import Online
from server.bodies import Bodies
from server.gate import Gate
from server.metrics import Figures
from server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class Means:
    """The engine, the names that it is served under, and what stands before it."""

    engine: Online
    names: tuple[str, ...]
    settings: ServerSettings
    gate: Gate
    figures: Figures
    bodies: Bodies
    started: int = field(default_factory=lambda: int(time.time()))


def new_request_id() -> str:
    """Return an id that no other request has: it keys the randomness of one that names no seed."""
    return f"req_{uuid.uuid4().hex}"
