"""What an operator may set of a worker; the defaults suit a GPU task on ECS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, TypeAdapter

_PREFIX = "TIDEMILL_"
_INFLIGHT_PER_SEQUENCE = 4
_MAX_TICK_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """How a worker treats its queue, its shards and its engine.

    A lease that is not renewed for `lease_seconds` is lost, a message that is not renewed for
    `visibility_seconds` comes again. Finished rows become durable when the oldest is
    `flush_seconds` old or there are `flush_bytes` of them: with the time it takes to write them, a
    kill loses at most ten seconds. `max_held_bytes` bounds requests and rows on their way.
    When it is told to stop, requests may take `grace_seconds` to finish. An engine that needs more
    than `start_seconds` to load, or does nothing for `stall_seconds`, is killed.
    """

    queue: Annotated[str, Field(min_length=1)]
    lease_seconds: PositiveFloat = 30.0
    visibility_seconds: Annotated[int, Field(ge=3, le=43_200)] = 60
    wait_seconds: Annotated[int, Field(ge=1, le=20)] = 10
    flush_seconds: PositiveFloat = 8.0
    flush_bytes: PositiveInt = 8 * 2**20
    max_inflight: PositiveInt | None = None
    max_held_bytes: PositiveInt = 64 * 2**20
    grace_seconds: Annotated[float, Field(ge=0, le=30)] = 20.0
    start_seconds: PositiveFloat = 1800.0
    stall_seconds: PositiveFloat = 120.0
    exit_when_idle_seconds: NonNegativeFloat | None = None

    @property
    def tick_seconds(self) -> float:
        """Return how often leases, messages and batches are looked at."""
        return min(_MAX_TICK_SECONDS, self.lease_seconds / 10, self.visibility_seconds / 10)

    def inflight_for(self, max_num_seqs: int) -> int:
        """Return how many requests an engine with so many sequences a step gets at once."""
        return self.max_inflight or _INFLIGHT_PER_SEQUENCE * max_num_seqs


_ADAPTER = TypeAdapter(WorkerConfig)


def read_config(environment: Mapping[str, str], given: Mapping[str, Any]) -> WorkerConfig:
    """Return what the environment says, and `given` over it; raises pydantic's ValidationError.

    A field is set by the variable of its name after `TIDEMILL_`.
    """
    fields = {
        name.removeprefix(_PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(_PREFIX)
    }
    return _ADAPTER.validate_python(fields | dict(given))
