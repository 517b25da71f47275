"""The settings of a worker: defaults, variables, and what is given."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tidemill.handler.worker.context.config import WorkerConfig, read_config


def test_variables_are_the_names_of_fields() -> None:
    """Given values take precedence; other variables are ignored."""
    environment = {"TIDEMILL_QUEUE": "q", "TIDEMILL_LEASE_SECONDS": "12", "TIDEMILL_BUCKET": "b"}
    environment |= {"TIDEMILL_FLUSH_BYTES": "7", "FLUSH_SECONDS": "1"}
    config = read_config(environment, {"flush_bytes": 9})
    assert config == WorkerConfig(queue="q", lease_seconds=12, flush_bytes=9)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("queue", ""),
        ("lease_seconds", "0"),
        ("lease_seconds", "soon"),
        ("visibility_seconds", "43201"),
        ("wait_seconds", "21"),
        ("wait_seconds", "0"),
        ("grace_seconds", "31"),
        ("max_inflight", "0"),
    ],
)
def test_what_cannot_be_is_refused(name: str, value: str) -> None:
    """The error names the setting, before anything starts."""
    with pytest.raises(ValidationError) as refused:
        read_config({"TIDEMILL_QUEUE": "q"}, {name: value})
    assert [error["loc"] for error in refused.value.errors()] == [(name,)]


@pytest.mark.parametrize(
    ("lease_seconds", "visibility_seconds", "tick_seconds"),
    [(3, 60, 0.3), (30, 60, 2), (300, 600, 2), (30, 5, 0.5)],
)
def test_a_lease_has_many_ticks(
    lease_seconds: float, visibility_seconds: int, tick_seconds: float
) -> None:
    """A message has many, too; the end of a batch is noticed within two seconds in any case."""
    config = WorkerConfig(
        queue="q", lease_seconds=lease_seconds, visibility_seconds=visibility_seconds
    )
    assert config.tick_seconds == tick_seconds


@pytest.mark.parametrize(
    ("given", "num_shards", "seconds"),
    [(None, 1, 2), (None, 8, 2), (None, 20, 5), (None, 10_000, 8), (0.5, 1, 0.5), (60, 1, 60)],
)
def test_rows_of_small_batches_become_durable_sooner(
    given: float | None, num_shards: int, seconds: float
) -> None:
    """A worker never writes more than four parts a second, which bounds what they cost."""
    config = WorkerConfig(queue="q", flush_seconds=given)
    assert config.flush_seconds_for(num_shards) == seconds


def test_an_engine_gets_more_than_it_can_run_at_once() -> None:
    """The default is four times as much."""
    assert WorkerConfig(queue="q").inflight_for(64) == 256
    assert WorkerConfig(queue="q", max_inflight=5).inflight_for(64) == 5
