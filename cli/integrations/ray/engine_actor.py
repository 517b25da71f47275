"""Engine actor: an engine in a process of its own, whose Ray actor ends when the engine dies."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic_core import to_json

from tidemill.protocol.in_flight import InFlightLimiter

from ...python.engine import Engine
from ...python.errors import EngineDied, RequestFailed, TidemillError
from ...python.in_flight import MAX_INFLIGHT_BYTES

_LOG = logging.getLogger(__name__)


class EngineActor:
    """An engine, and its lines in flight: at most four times its sequences, and 64 MiB.

    Waits for the model. Raises TidemillError where it cannot be loaded, which ends the Dataset:
    the next actor would fail likewise.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._engine = Engine(**options)
        try:
            self._engine.info()
        except EngineDied as exc:
            raise TidemillError(str(exc)) from None
        self._in_flight = InFlightLimiter(MAX_INFLIGHT_BYTES, self._engine.process.max_inflight())

    async def rows(self, lines: Iterable[tuple[int, bytes]]) -> list[bytes]:
        """Return the row of each numbered line; ends this process where the engine has died.

        Ray runs the tasks of an actor that has ended on another one, those of a live one never.
        """
        try:
            return await asyncio.gather(*(self._row(number, line) for number, line in lines))
        except EngineDied as exc:
            _LOG.error("%s\nThis actor ends; Ray runs its rows on another one.", exc)
            logging.shutdown()
            os._exit(1)

    async def _row(self, number: int, line: bytes) -> bytes:
        async with self._in_flight.reserve(len(line)):
            try:
                sent = self._engine.process.send_line(number, line.removesuffix(b"\n"))
                return (await asyncio.wrap_future(sent.future)).data
            except RequestFailed as exc:  # which never reached the engine
                error = {"code": exc.code, "message": exc.message, "param": exc.param}
                return to_json({"response": None, "error": error})
