"""Worker context: AWS, the deployment's resources, configuration, clocks and meters."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat, takewhile
from typing import NamedTuple

from tidemill.batch.file.throughput import RateWindow
from tidemill.batch.progress import HistoryBucket
from tidemill.net.backoff import retry_async
from tidemill.net.tracing import Tracing

from ...aws.calls import Operation, OperationDriver, T
from ...aws.queues import Queue
from ...aws.stores.usage import EVERYBODY
from ...deployment import Deployment
from ...errors import AwsError, ConditionFailed, NotThere, ObjectChanged
from ...observability import Figures, emit, logger
from ..kept_results import KeptResults
from ..parity_results import ParityResults
from .cold_start import ColdStart
from .config import WorkerConfig
from .history import History
from .precedence import Precedence
from .rate_meter import RateMeter
from .usage_meter import UsageMeter

REPORT_SECONDS = 30.0


class GpuUsage:
    """Sums up GPU seconds by tenant, and EVERYBODY's, until `collect`; `now` is monotonic."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._collected_at = float("-inf")

    def add(self, tenant: str, seconds: float) -> None:
        """Add GPU time that this worker has written to the table as progress."""
        if seconds > 0:
            self.put_back({tenant: seconds, EVERYBODY: seconds})

    def put_back(self, left: Mapping[str, float]) -> None:
        """Add back collected GPU time that was not written, by tenant, EVERYBODY included."""
        for tenant, seconds in left.items():
            self._seconds[tenant] += seconds

    def is_due(self, now: float) -> bool:
        """Return whether there is GPU time that is due to be written."""
        return bool(self._seconds) and now >= self._collected_at + REPORT_SECONDS

    def collect(self, now: float) -> dict[str, float]:
        """Return the seconds by tenant and reset."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        self._collected_at = now
        return seconds


RETRY_SECONDS = 1.0
PATIENCE_SECONDS = 60.0
# Time between two checks; a repeated check takes about as long.
_RESULTS_SECONDS = 10.0


class KnownPause(NamedTuple):
    """Pause of a batch: its end, and the time until which messages do not reread the batch."""

    until: float
    known_until: float


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Shared state of a worker. `wall` is Unix time, `clock` is monotonic.

    `usage_meter` sums up the work done, `history` the progress of each batch, `rate_meter` the
    throughput at full load, `gpu_usage` the GPU time of each tenant; `cold_start` the time before.
    `ended_batches` maps batches that have ended to the time (Unix seconds) until which their
    messages are dropped; messages of `paused_batches` are postponed. `paces` are those of batches
    whose last run here ended less than a minute ago. `precedence` finds shards that come before
    those of a message. `tracing` is None if spans are disabled.
    """

    aws: OperationDriver
    deployment: Deployment
    queue: Queue
    config: WorkerConfig
    wall: Callable[[], float] = time.time
    clock: Callable[[], float] = time.monotonic
    usage_meter: UsageMeter = field(default_factory=UsageMeter)
    history: History = field(default_factory=History)
    rate_meter: RateMeter = field(default_factory=RateMeter)
    cold_start: ColdStart = field(default_factory=ColdStart)
    parity_results: ParityResults | None = None
    kept_results: KeptResults | None = None
    gpu_usage: GpuUsage = field(default_factory=GpuUsage)
    ended_batches: dict[str, float] = field(default_factory=dict)
    paused_batches: dict[str, KnownPause] = field(default_factory=dict)
    paces: dict[str, RateWindow] = field(default_factory=dict)
    precedence: Precedence = field(default_factory=Precedence)
    tracing: Tracing | None = None

    @property
    def model(self) -> str | None:
        """Return the model whose queue this worker serves; None for an unknown queue."""
        known = self.deployment.work.items()
        return next((model for model, queue in known if queue == self.queue), None)

    def emit(self, figures: Figures, **labels: str | int) -> None:
        """Emit metrics of this worker's model, if there are any."""
        if figures:
            emit(figures, model=self.model, **labels)

    def emit_cold_start(self) -> None:
        """Emit the cold start of this worker, once it has its first row."""
        if self.cold_start.reach("row"):
            logger.info("cold start", extra=self.cold_start.steps)
            self.emit(self.cold_start.figures())

    def keep_pace(self, batch_id: str, pace: RateWindow) -> None:
        """Store the pace of an ended run for the next run of its batch."""
        self.paces[batch_id] = pace
        for known in [each for each in self.paces if not any(self.paces[each].rates)]:
            del self.paces[known]

    async def write_history(self) -> None:
        """Add the progress to the history of each batch; a failed write is dropped."""
        for batch, start, seconds, gained in self.history.collect(self.clock()):
            bucket = HistoryBucket.of(start, seconds, gained)
            await self.aws.run(self.deployment.ledger.add_history(batch, bucket))

    async def write_gpu_usage(self) -> None:
        """Add the GPU time to the day's usage; an unwritten rest is kept for the next call."""
        left = self.gpu_usage.collect(self.clock())
        try:
            for tenant in tuple(left):
                seconds, now = left[tenant], self.wall()
                await self.aws.run(self.deployment.usage.add_gpu_seconds(tenant, seconds, now))
                del left[tenant]
        finally:
            self.gpu_usage.put_back(left)

    async def read_parity_results(self) -> None:
        """Copy parity results of other machines; without them the engine runs the parity check."""
        if self.parity_results is not None:
            try:
                async with asyncio.timeout(_RESULTS_SECONDS):
                    await self.aws.run(self.parity_results.download())
            except Exception as exc:  # noqa: BLE001 - a start does not depend on it
                logger.warning("parity results could not be read", reason=repr(exc))

    async def write_parity_results(self) -> None:
        """Copy this machine's parity results to the bucket, for other machines."""
        if self.parity_results is not None:
            await self.retry(self.parity_results.upload)

    async def write_endpoints(self, endpoints: Sequence[str]) -> None:
        """Write the endpoints of this worker's model, which intake reads."""
        if self.model is not None and endpoints:
            await self.aws.run(self.deployment.fleets.put_endpoints(self.model, endpoints))

    async def write_rate(self) -> None:
        """Write the throughput of this worker; an unknown model has no fleet."""
        pace = self.rate_meter.collect(self.clock(), self.wall())
        if self.model is not None:
            await self.aws.run(self.deployment.fleets.put_rate(self.model, pace))

    async def retry(self, make: Callable[[], Operation[T]]) -> T:
        """Run an operation, retried while AWS fails, for a minute; then raises the error.

        Errors that a retry cannot help are raised at once.
        """
        give_up_at = self.clock() + PATIENCE_SECONDS

        def log_retry(exc: AwsError, _: float) -> None:
            logger.warning("tried again", reason=str(exc))

        return await retry_async(
            lambda: self.aws.run(make()),
            takewhile(lambda _: self.clock() < give_up_at, repeat(RETRY_SECONDS)),
            AwsError,
            lambda exc: not isinstance(exc, (ConditionFailed, NotThere, ObjectChanged)),
            notify=log_retry,
        )
