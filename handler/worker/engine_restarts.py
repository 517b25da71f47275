"""Restarts of one engine: backoff between failed starts, and when it is given up."""

from __future__ import annotations

import asyncio

from tidemill.batch.errors import HandlerError
from tidemill.engine_process.client import EngineDied, EngineFailed
from tidemill.engine_process.deaths import MAX_DEATHS_WITHOUT_ROW, MAX_FAILED_STARTS, Streak
from tidemill.net.backoff import exponential_delay

from ..observability import Metric, logger
from .context.context import WorkerContext

MAX_BACKOFF_SECONDS = 30.0


class EngineGivenUp(HandlerError):
    """An engine cannot be started, or dies repeatedly without a row; the reason has been logged."""

    code = "engine_given_up"


class EngineRestarts:
    """Counts the failed starts of an engine, and its lives without a row."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._failed_starts = Streak()
        self._barren_lives = Streak()

    def record_start(self) -> None:
        """Record that the engine has loaded."""
        self._failed_starts.end()

    def record_death(self, num_answered: int) -> None:
        """Record that the engine has died after that many rows; raises EngineGivenUp."""
        if num_answered:
            self._barren_lives.end()
        elif self._barren_lives.extend(MAX_DEATHS_WITHOUT_ROW):
            lives = self._barren_lives.length
            logger.error("engine dies repeatedly without a row", num_lives=lives)
            raise EngineGivenUp("engine dies repeatedly without a row")

    async def back_off(self, failure: EngineFailed) -> None:
        """Wait before the restart of an engine that died while loading; raises EngineGivenUp.

        An engine that has reported why it cannot start would fail again.
        """
        self._context.emit({Metric.ENGINE_DEATHS: 1})
        is_last = self._failed_starts.extend(MAX_FAILED_STARTS)
        if failure.code != EngineDied.code or is_last:
            logger.error("engine cannot be started", reason=str(failure), code=failure.code)
            raise EngineGivenUp(str(failure)) from failure
        seconds = exponential_delay(self._failed_starts.length - 1, 1.0, most=MAX_BACKOFF_SECONDS)
        logger.error("engine died while starting", reason=str(failure), next_try_seconds=seconds)
        await asyncio.sleep(seconds)
