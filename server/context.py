"""Server context: the engine and the state that all routes share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tidemill.protocol.contract import Online

from .admission import AdmissionControl
from .metrics import ServerMetrics
from .request_bodies import BodyReader
from .settings import ServerSettings


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The engine, its served names, settings, admission control, metrics and body reader."""

    engine: Online
    names: tuple[str, ...]
    settings: ServerSettings
    admission: AdmissionControl
    metrics: ServerMetrics
    body_reader: BodyReader
    started: int = field(default_factory=lambda: int(time.time()))
