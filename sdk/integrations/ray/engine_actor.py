"""Engine actor: an engine in a child process; its Ray actor exits when the engine dies."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tidemill.protocol.in_flight import InFlightLimiter

from ...engine import Engine
from ...engine_process import EngineProcess
from ...errors import EngineDied, TidemillError
from ...in_flight import MAX_INFLIGHT_BYTES

_LOG = logging.getLogger(__name__)


class EngineActor:
    """An engine with `options`, and up to 64 MiB of batches in flight.

    Waits for the model. Raises TidemillError if it cannot be loaded, which ends the Dataset,
    because the next actor would also fail.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._engine = Engine(**options)
        try:
            self._engine.info()
        except EngineDied as exc:
            raise TidemillError(str(exc)) from None
        self._in_flight = InFlightLimiter(MAX_INFLIGHT_BYTES)

    @asynccontextmanager
    async def reserve(self, num_bytes: int) -> AsyncIterator[EngineProcess]:
        """Yield the engine once `num_bytes` fit in flight; exit this process if the engine dies.

        Ray reruns the tasks of an actor only after that actor has exited.
        """
        async with self._in_flight.reserve(num_bytes):
            try:
                yield self._engine.process
            except EngineDied as exc:
                _LOG.error("%s\nThis actor exits; Ray reruns its rows on another one.", exc)
                logging.shutdown()
                os._exit(1)
