"""Engine actor: an engine in a process of its own, whose Ray actor ends when the engine dies."""

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
    """An engine of `options`, and its batches in flight, which have 64 MiB in all.

    Waits for the model. Raises TidemillError where it cannot be loaded, which ends the Dataset:
    the next actor would fail likewise.
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
        """Return the engine once a batch of so many bytes has room; ends this process if it dies.

        Ray runs the tasks of an actor that has ended on another one, those of a live one never.
        """
        async with self._in_flight.reserve(num_bytes):
            try:
                yield self._engine.process
            except EngineDied as exc:
                _LOG.error("%s\nThis actor ends; Ray runs its rows on another one.", exc)
                logging.shutdown()
                os._exit(1)
