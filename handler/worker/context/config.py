"""Configuration of a worker; the defaults suit a GPU task on ECS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
)

from tidemill.batch.result_key import MAX_BYTES
from tidemill.batch.weekly_hours import WeeklyHours, number_at

_PREFIX = "TIDEMILL_"
_INFLIGHT_PER_SEQUENCE = 4
_MAX_TICK_SECONDS = 2.0
_MIN_FLUSH_SECONDS = 2.0
_MAX_FLUSH_SECONDS = 8.0
_FLUSH_SECONDS_PER_SHARD = 0.25


def _checked(hours: str) -> str:
    WeeklyHours.parse(hours)
    return hours


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings of a worker's queue, leases, flushing and engine.

    A lease expires after `lease_seconds` without renewal. `visibility_seconds` is the visibility
    timeout of a message. Finished rows become durable when the oldest is `flush_seconds` old, by
    default `flush_seconds_for`, or there are `flush_bytes` of them: including the time of the
    write, a kill loses at most ten seconds.
    `max_held_bytes` bounds requests and unflushed rows (backpressure), `max_shards` the number of
    owned shards, with their lines in memory, so that they run in one order. `reuse` stores results
    for later batches of their tenant, at most `reuse_max_size` bytes per tenant; `reuse_sampled`
    also stores non-deterministic results. After SIGTERM, requests have `grace_seconds` to finish.
    An engine that needs more than `start_seconds` to load is killed. During `min_workers_hours`,
    `min_workers` of a model's idle workers stay.
    """

    queue: Annotated[str, Field(min_length=1)]
    lease_seconds: PositiveFloat = 30.0
    visibility_seconds: Annotated[int, Field(ge=3, le=43_200)] = 60
    wait_seconds: Annotated[int, Field(ge=1, le=20)] = 10
    flush_seconds: PositiveFloat | None = None
    flush_bytes: PositiveInt = 8 * 2**20
    max_inflight: PositiveInt | None = None
    max_held_bytes: PositiveInt = 64 * 2**20
    max_shards: PositiveInt = 32
    reuse: bool = False
    reuse_sampled: bool = False
    reuse_max_size: PositiveInt = MAX_BYTES
    grace_seconds: Annotated[float, Field(ge=0, le=30)] = 20.0
    start_seconds: PositiveFloat = 1800.0
    exit_when_idle_seconds: NonNegativeFloat | None = None
    min_workers: NonNegativeInt = 0
    min_workers_hours: Annotated[str, AfterValidator(_checked)] = ""

    def min_workers_at(self, now: float) -> int:
        """Return the number of idle workers that stay at a time (Unix seconds)."""
        return number_at(self.min_workers, self.min_workers_hours, now)

    @property
    def tick_seconds(self) -> float:
        """Return the interval of the heartbeat."""
        return min(_MAX_TICK_SECONDS, self.lease_seconds / 10, self.visibility_seconds / 10)

    def flush_seconds_for(self, num_shards: int) -> float:
        """Return after how many seconds finished rows of a batch of this size become durable.

        The counts of a small batch change every two seconds. Shards of a large one are written in
        turn, so its counts change as often: a worker writes at most four parts per second.
        """
        if self.flush_seconds is not None:
            return self.flush_seconds
        seconds = _FLUSH_SECONDS_PER_SHARD * num_shards
        return min(max(_MIN_FLUSH_SECONDS, seconds), _MAX_FLUSH_SECONDS)

    def inflight_for(self, max_num_seqs: int) -> int:
        """Return the maximum number of requests in flight for an engine of this batch size."""
        return self.max_inflight or _INFLIGHT_PER_SEQUENCE * max_num_seqs


_ADAPTER = TypeAdapter(WorkerConfig)


def read_config(environment: Mapping[str, str], given: Mapping[str, Any]) -> WorkerConfig:
    """Read the configuration from the environment, overridden by `given`.

    A field is set by the variable of its name after `TIDEMILL_`. Raises pydantic's ValidationError.
    """
    fields = {
        name.removeprefix(_PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(_PREFIX)
    }
    return _ADAPTER.validate_python(fields | dict(given))
