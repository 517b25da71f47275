"""What every part of a worker works with: AWS, the deployment's resources, settings and clocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from engine.batchfile.pace import Pace
from handler.aws.calls import Operation, T
from handler.aws.queues import Queue
from handler.batch.history import Bucket
from handler.deployment import Deployment
from handler.errors import AwsError, ConditionFailed, NotThere, ObjectChanged
from handler.log import logger
from handler.metrics import Figures, emit
from handler.worker.site.cold_start import ColdStart
from handler.worker.site.config import WorkerConfig
from handler.worker.site.history import History
from handler.worker.site.meter import Meter
from handler.worker.site.tempo import Tempo

RETRY_SECONDS = 1.0
PATIENCE_SECONDS = 60.0


class Runs(Protocol):
    """Drives operations; `aio.AioAws` does."""

    async def run(self, operation: Operation[T]) -> T:
        """Return the operation's result; raises AwsError for what it does not handle itself."""


@dataclass(frozen=True, slots=True)
class Site:
    """Where a worker works. `wall` is Unix time, `clock` one that is never set.

    `meter` sums up what the worker does, `history` what each batch gains by it, and `tempo` is how
    fast that goes; `cold_start` is what came before. `over` names batches that were found to be
    over, and until when (Unix seconds) another cannot have the name of one. `paces` are those of
    batches whose last run here has ended less than a minute ago.
    """

    aws: Runs
    deployment: Deployment
    queue: Queue
    config: WorkerConfig
    wall: Callable[[], float] = time.time
    clock: Callable[[], float] = time.monotonic
    meter: Meter = field(default_factory=Meter)
    history: History = field(default_factory=History)
    tempo: Tempo = field(default_factory=Tempo)
    cold_start: ColdStart = field(default_factory=ColdStart)
    over: dict[str, float] = field(default_factory=dict)
    paces: dict[str, Pace] = field(default_factory=dict)

    @property
    def model(self) -> str | None:
        """Return the model whose queue this worker serves; None for a queue of no known model."""
        known = self.deployment.work.items()
        return next((model for model, queue in known if queue == self.queue), None)

    def tell(self, figures: Figures, **labels: str | int) -> None:
        """Tell figures of this worker's model, if there are any."""
        if figures:
            emit(figures, model=self.model, **labels)

    def tell_cold_start(self) -> None:
        """Tell what this worker's start took, when it has its first row."""
        if self.cold_start.reach("row"):
            logger.info("cold start", extra=self.cold_start.steps)
            self.tell(self.cold_start.figures())

    def leave_pace(self, batch_id: str, pace: Pace) -> None:
        """Keep the pace of a run that has ended, for the next one of its batch."""
        self.paces[batch_id] = pace
        for known in [each for each in self.paces if not any(self.paces[each].rates)]:
            del self.paces[known]

    async def tell_history(self) -> None:
        """Add what was gained to the history of each batch; what fails is left out of it."""
        for batch, start, seconds, gained in self.history.take(self.clock()):
            bucket = Bucket(
                start,
                seconds,
                gained.completed,
                gained.failed,
                gained.completion_tokens,
                gained.prompt_tokens,
                round(gained.audio_seconds, 3),
            )
            await self.aws.run(self.deployment.ledger.add_history(batch, bucket))

    async def tell_tempo(self) -> None:
        """Tell how fast this worker goes; a model that nobody knows has no fleet."""
        pace = self.tempo.take(self.clock(), self.wall())
        if self.model is not None:
            await self.aws.run(self.deployment.fleets.tell_pace(self.model, pace))

    async def insist(self, make: Callable[[], Operation[T]]) -> T:
        """Run an operation again while AWS fails, for a minute; raises what it fails with then.

        What a repetition cannot mend is raised at once.
        """
        give_up_at = self.clock() + PATIENCE_SECONDS
        while True:
            try:
                return await self.aws.run(make())
            except (ConditionFailed, NotThere, ObjectChanged):
                raise
            except AwsError as exc:
                if self.clock() >= give_up_at:
                    raise
                logger.warning("tried again", reason=str(exc))
            await asyncio.sleep(RETRY_SECONDS)
