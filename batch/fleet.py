"""Values of a fleet: its plan, its workers, their ends, and the circuit breaker.

A fleet is the workers of one model. A launcher starts them, they exit when idle, and a crash loop
opens the circuit breaker. No I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from .weekly_hours import number_at

# The code of a breaker opened by a refusal of AWS that only we can fix.
START_REFUSED = "start_refused"

LauncherKind = Literal["ecs", "sagemaker", "kubernetes", "processes"]


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Deployment settings of a model's workers.

    `release` names what new workers are started as: another one closes the breaker, and takes the
    place of workers of the one before. Between one and `max_workers` are started so that what is
    open is done in `target_seconds`, or by the end of its window; from its start to its first rows
    a worker takes about `start_seconds`. In `min_workers_hours` (`WeeklyHours`) `min_workers` are
    kept also without work. `means` are the launcher's own.
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
        """Return how many workers are kept at a time (Unix seconds), also without work."""
        return number_at(self.min_workers, self.min_workers_hours, now)


@dataclass(frozen=True, slots=True)
class OpenWork:
    """Open work of one running batch, and its present rates over all its workers.

    Rows are those without a result, shards those that a worker has (`num_running` of them) or must
    get. It began at `since`, and no row is run any more from `expires_at` (Unix seconds) on.
    `tokens_left`, read and written, are foretold by what its rows have taken so far, 0 before the
    first; `expected_work` is left of what intake expected (`ExpectedTokens.work`).
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


class WorkerStatus(StrEnum):
    """A starting worker may still wait for its machine; a stopping one takes no more work.

    One that hangs runs, but has not shown for a while that it is alive.
    """

    STARTING = "starting"
    RUNNING = "running"
    HUNG = "hung"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker as its launcher knows it; `started_at` is Unix seconds."""

    id: str
    release: str
    status: WorkerStatus = WorkerStatus.RUNNING
    started_at: int | None = None


class EndKind(StrEnum):
    """Reason of a worker's end: idle or asked to; by itself; its machine; or no capacity.

    Of a start: `REFUSED` until something of ours is fixed, or `NOT_STARTED` for an unknown reason.
    """

    CLEAN = "good"
    CRASHED = "bad"
    INTERRUPTED = "taken"
    NO_CAPACITY = "no_capacity"
    REFUSED = "refused"
    NOT_STARTED = "not_started"


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """The end of a worker, as its launcher tells it. `reason` is a sentence for people.

    `last_words` is the last that its log says, where that is known.
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
    """Reason, shown to users, why open lines are not run, since when, and what helps."""

    code: str
    message: str
    since: int


@dataclass(frozen=True, slots=True)
class Launch:
    """A worker that was asked for: launchers list it a while later."""

    worker: str
    release: str
    at: int


@dataclass(frozen=True, slots=True)
class FleetState:
    """Stored state of a fleet; changed as a whole, by `FleetStore.change`.

    `last_number` is that of the last worker that was asked for: no number comes twice, so that no
    start is done twice. `ends` are the recent bad ones and those of starts that came to nothing,
    the last of these for `refusal`. No start before `not_before`, which a want of machines sets.
    """

    last_number: int = 0
    launches: tuple[Launch, ...] = ()
    ends: tuple[WorkerEnd, ...] = ()
    # The table calls it `brake`.
    breaker: Annotated[CircuitBreaker | None, Field(alias="brake")] = None
    not_before: int = 0
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerRate:
    """Rates that workers of a model measured lately: of one worker, a second at full load.

    It has `num_gpus`, 0 where nobody has told. Tokens are those read and those written, work is
    what intake expected of them. `rows_at` (Unix seconds) is when a row of this model was last made
    durable, by any of them.
    """

    rows_at: int = 0
    rows_per_second: float = 0.0
    tokens_per_second: float = 0.0
    expected_work_per_second: float = 0.0
    num_gpus: int = 0
