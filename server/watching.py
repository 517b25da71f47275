"""A server that nobody asks anything hears of it, too, when its engine cannot go on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine.contract import Served
from engine.errors import EngineError
from server.gate import Gate

logger = logging.getLogger(__name__)

WATCH_SECONDS = 1.0


@asynccontextmanager
async def watched(
    engine: Served, gate: Gate, seconds: float = WATCH_SECONDS
) -> AsyncIterator[None]:
    """While entered, give up the gate when the engine behind it can answer nothing any more."""

    async def watch() -> None:
        while True:
            try:
                engine.stats()
            except EngineError as exc:
                logger.error("the engine cannot go on: %s", exc)  # noqa: TRY400 - no fault of ours
                gate.give_up()
                return
            await asyncio.sleep(seconds)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
