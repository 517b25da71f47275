"""Values of a fleet: its plan, its workers, their ends, and the circuit breaker.

A fleet is all workers of one model. A launcher starts them, they exit when idle, and a crash loop
opens the circuit breaker. No I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from .weekly_hours import number_at

# The breaker's code after a refusal by AWS that only an operator can fix.
START_REFUSED = "start_refused"

LauncherKind = Literal["ecs", "sagemaker", "kubernetes", "processes"]


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Deployment settings of a model's workers.

    `release` identifies how new workers are started: a new release closes the breaker and replaces
    the workers of the old one. Between one and `max_workers` are started, so that open work is
    finished within `target_seconds` or by the end of its window. A worker takes about
    `start_seconds` from its start to its first rows. In `min_workers_hours` (`WeeklyHours`) at
    least `min_workers` are kept even without work. `means` are specific to the launcher.
    """

    model: str
    launcher: LauncherKind
    release: str
    max_workers: int = 1
    target_seconds: int = 3600
    start_seconds: int = 300
    min_workers: int = 0
    min_workers_hours: str = ""
    means: dict[str, Any] = field(default_factory=dict)

    def min_workers_at(self, now: float) -> int:
        """Return the minimum number of workers at a time (Unix seconds), even without work."""
        return number_at(self.min_workers, self.min_workers_hours, now)


@dataclass(frozen=True, slots=True)
class OpenWork:
    """Open work of one running batch, and its present rates over all its workers.

    `num_rows` counts rows without a result; shards are those that a worker has (`num_running`) or
    must get. The batch began at `since`, and no row runs from `expires_at` (Unix seconds) on.
    `tokens_left`, read and written, are extrapolated from finished rows, and 0 before the first;
    `expected_work` is the rest of intake's estimate (`ExpectedTokens.work`). Among the work of a
    `tenant`, that of the lowest `priority` comes first.
    """

    batch_id: str
    model: str
    num_rows: int
    num_shards: int
    expires_at: int
    num_running: int = 0
    rows_per_second: float = 0.0
    tokens_per_second: float = 0.0
    since: int = 0
    tokens_left: int = 0
    expected_work: float = 0.0
    tenant: str = ""
    priority: int = 0


class WorkerStatus(StrEnum):
    """Status of a worker: a starting one may still wait for its machine.

    A stopping one gets no more work, and a hanging one has not reported for a while.
    """

    STARTING = "starting"
    RUNNING = "running"
    HUNG = "hung"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker as reported by its launcher; `started_at` is Unix seconds."""

    id: str
    release: str
    status: WorkerStatus = WorkerStatus.RUNNING
    started_at: int | None = None


class EndKind(StrEnum):
    """Reason of a worker's end: idle or stopped; by itself; its machine; or no capacity.

    For a start: `REFUSED` needs a fix by the operator, and `NOT_STARTED` has an unknown reason.
    """

    CLEAN = "good"
    CRASHED = "bad"
    INTERRUPTED = "taken"
    NO_CAPACITY = "no_capacity"
    REFUSED = "refused"
    NOT_STARTED = "not_started"


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """The end of a worker as reported by its launcher; `reason` is a sentence for people.

    `last_words` is the last line of its log, if known.
    """

    model: str
    worker: str
    release: str
    at: int
    kind: EndKind
    reason: str
    exit_code: int | None = None
    last_words: str | None = None


@dataclass(frozen=True, slots=True)
class CircuitBreaker:
    """Open circuit breaker of a release: `reason` says what happened, `advice` what to do."""

    at: int
    release: str
    code: str
    reason: str
    advice: str


@dataclass(frozen=True, slots=True)
class WaitingReason:
    """Reason, shown to users, why open lines do not run, since when, and what to do."""

    code: str
    message: str
    since: int


@dataclass(frozen=True, slots=True)
class Launch:
    """A requested worker; launchers list it with a delay."""

    worker: str
    release: str
    at: int


@dataclass(frozen=True, slots=True)
class FleetState:
    """Stored state of a fleet; changed as a whole, by `FleetStore.change`.

    `last_number` is the number of the last requested worker: numbers are never reused, so that no
    start happens twice. `ends` lists recent failures of workers and of starts, and `refusal` is the
    last failed start. No worker starts before `not_before`, which a lack of machines sets.
    """

    last_number: int = 0
    launches: tuple[Launch, ...] = ()
    ends: tuple[WorkerEnd, ...] = ()
    # The circuit breaker's stored name.
    breaker: Annotated[CircuitBreaker | None, Field(alias="brake")] = None
    not_before: int = 0
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerRate:
    """Rates that workers of a model measured recently: per worker and second, at full load.

    The worker has `num_gpus`, 0 if unknown. Tokens are those read and written, work is intake's
    estimate for them. `rows_at` (Unix seconds) is when any worker last made a row of this model
    durable.
    """

    rows_at: int = 0
    rows_per_second: float = 0.0
    tokens_per_second: float = 0.0
    expected_work_per_second: float = 0.0
    num_gpus: int = 0

    def cost_per_hour(self, gpu_hour_price: float | None) -> float | None:
        """Return the cost of a worker's GPUs per hour; None if their number or price is unknown."""
        return (
            None if gpu_hour_price is None or not self.num_gpus else self.num_gpus * gpu_hour_price
        )
