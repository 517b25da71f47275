"""Recording shards while the file is still being read."""

from __future__ import annotations

import threading

import pytest

from tidemill.batch.model import Shard
from tidemill.handler.intake.shards import ShardWriter


def shard(number: int) -> Shard:
    """Return a shard of one line."""
    return Shard("batch", number, number + 1, 1, number, number + 1)


def test_every_shard_is_recorded_before_drain_returns() -> None:
    """Shards are recorded in any order, each once."""
    recorded: list[int] = []
    with ShardWriter(lambda each: recorded.append(each.number)) as writer:
        for number in range(500):
            writer.write(shard(number))
        writer.drain()
        assert sorted(recorded) == list(range(500))


def test_a_shard_that_cannot_be_recorded_stops_the_reading() -> None:
    """The error comes up while shards are written, not only at the end of a long file."""

    def put(each: Shard) -> None:
        if each.number == 3:
            raise ConnectionError("lost")

    with ShardWriter(put) as writer:

        def write_all() -> None:
            for number in range(100):
                writer.write(shard(number))

        with pytest.raises(ConnectionError):
            write_all()


def test_the_last_shard_counts_too() -> None:
    """Its error comes up when the writer is drained."""

    def fail(_: Shard) -> None:
        raise ConnectionError("lost")

    with ShardWriter(fail) as writer:
        writer.write(shard(0))
        with pytest.raises(ConnectionError):
            writer.drain()


def test_the_number_of_waiting_shards_is_limited() -> None:
    """When none can be recorded, reading waits too: memory does not grow with the file."""
    gate = threading.Event()
    written: list[int] = []
    with ShardWriter(lambda _: gate.wait() and None) as writer:

        def write_all() -> None:
            for number in range(100):
                writer.write(shard(number))
                written.append(number)

        thread = threading.Thread(target=write_all)
        thread.start()
        thread.join(timeout=0.5)
        num_waiting = len(written)
        gate.set()
        thread.join()
        writer.drain()
    assert num_waiting <= 32
    assert len(written) == 100
