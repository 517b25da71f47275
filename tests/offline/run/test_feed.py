"""Rows in order, requests bounded in number and bytes, whatever the engine does."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.batch.file.lines import RawLine
from tidemill.offline.console.errors import OutputLost
from tidemill.offline.files.input_file import PlacedLine
from tidemill.offline.files.kept_rows import KeptRows
from tidemill.offline.files.row_writer import OrderedRows, OutputFiles
from tidemill.offline.files.spool import Spool
from tidemill.offline.run.feed import Feed, InFlightLimits, line_runner
from tidemill.offline.run.tally import Tally
from tidemill.protocol.contract import Reply


class MemoryOutput:
    """Keeps what is written; fails once it has `room` rows."""

    def __init__(self, room: int = 10**9) -> None:
        self.rows: list[bytes] = []
        self.room = room

    def write(self, rows: bytes) -> None:
        """Take rows."""
        self.rows += rows.splitlines()
        if len(self.rows) > self.room:
            raise OutputLost("full")

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the feed has no business with {name}")


class Turns:
    """Answers each request after as many turns of the loop as its body says."""

    def __init__(self) -> None:
        self.running = 0
        self.most_running = 0
        self.cancelled = 0

    async def respond(self, url: str, body: dict[str, Any], request_id: str, created: int) -> Reply:
        """Wait, then echo."""
        del url, request_id, created
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for _ in range(body["turns"]):
                await asyncio.sleep(0)
            if body.get("forever"):
                await asyncio.Event().wait()
            if body.get("cancel"):
                await cancelled()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return Reply(200, {"text": "x" * body.get("size", 1)})


async def cancelled() -> None:
    """Raise CancelledError although no task cancels this one."""
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


@contextmanager
def writer_to(output: MemoryOutput, num_rows: int) -> Iterator[OrderedRows]:
    """Yield what puts rows into order before the output."""
    with closing(Spool(None, num_rows)) as spool:
        yield OrderedRows(OutputFiles(output), KeptRows(b"", (0,)), spool)


def lines(bodies: list[dict[str, Any]]) -> Iterator[PlacedLine]:
    """Yield a line for each body."""
    for number, body in enumerate(bodies, start=1):
        fields = {"custom_id": str(number), "url": "/x", "body": {"turns": 0} | body}
        yield PlacedLine(number - 1, RawLine(number, json.dumps(fields).encode()))


def feed(
    bodies: list[dict[str, Any]],
    *,
    limits: InFlightLimits,
    stop_after: int | None = None,
    room: int = 10**9,
) -> tuple[list[str], Turns, bool]:
    """Run the bodies and return the ids in the output, the engine and whether all were done."""
    output = MemoryOutput(room)
    engine = Turns()

    async def run(writer: OrderedRows) -> bool:
        one = Feed(line_runner(engine, created=0), writer, Tally(), limits=limits)
        if stop_after is not None:
            stopping = asyncio.create_task(stop(one))
            done = await one.run(lines(bodies))
            await stopping
            return done
        return await one.run(lines(bodies))

    async def stop(one: Feed) -> None:
        for _ in range(stop_after or 0):
            await asyncio.sleep(0)
        one.stop()

    with writer_to(output, len(bodies)) as writer:
        is_done = asyncio.run(run(writer))
    assert writer.num_written == len(output.rows)
    return [json.loads(row)["custom_id"] for row in output.rows], engine, is_done


@given(
    st.lists(st.integers(0, 20), max_size=100),
    st.integers(1, 10),
    st.integers(1, 1_000),
)
def test_rows_come_out_in_order_and_no_bound_is_broken(
    turns: list[int], max_inflight: int, max_held_bytes: int
) -> None:
    """Any durations and any window size are possible."""
    bodies = [{"turns": count} for count in turns]
    ids, engine, is_done = feed(bodies, limits=InFlightLimits(max_inflight, max_held_bytes))
    assert is_done
    assert ids == [str(number) for number in range(1, len(turns) + 1)]
    assert engine.most_running <= max_inflight


@given(st.lists(st.integers(0, 20), min_size=1, max_size=50), st.integers(0, 60))
def test_a_stop_leaves_the_first_rows_and_nothing_running(turns: list[int], after: int) -> None:
    """The written rows are a prefix; every running request has been cancelled."""
    bodies = [{"turns": count} for count in turns]
    ids, engine, is_done = feed(bodies, limits=InFlightLimits(4), stop_after=after)
    assert ids == [str(number) for number in range(1, len(ids) + 1)]
    assert is_done == (len(ids) == len(turns)) or not is_done
    assert engine.running == 0


def test_a_stop_ends_requests_that_never_would() -> None:
    """Rows behind the one that was cancelled are left for the resume."""
    ids, engine, is_done = feed(
        [{}, {"forever": True}, {}, {"forever": True}], limits=InFlightLimits(4), stop_after=50
    )
    assert (ids, engine.cancelled, is_done) == (["1"], 2, False)


def test_rows_behind_a_slow_line_do_not_keep_the_engine_idle() -> None:
    """Finished rows that wait count neither as requests nor as bytes in memory: others run."""

    class Watching(Turns):
        async def respond(
            self, url: str, body: dict[str, Any], request_id: str, created: int
        ) -> Reply:
            held.append(one._in_flight._num_bytes)
            return await super().respond(url, body, request_id, created)

    held: list[int] = []
    bodies = [{"turns": 3_000}, *[{"turns": 2, "size": 900}] * 500]
    output, engine = MemoryOutput(), Watching()

    async def run(writer: OrderedRows) -> bool:
        nonlocal one
        limits = InFlightLimits(3, 10_000)
        one = Feed(line_runner(engine, created=0), writer, Tally(), limits=limits)
        return await one.run(lines(bodies))

    one: Any = None
    with writer_to(output, len(bodies)) as writer:
        assert asyncio.run(run(writer))
    assert len(output.rows) == 501
    assert engine.most_running == 3
    # Rows outgrow their requests, but none of them waits in memory.
    assert max(held) <= 3 * 1_200


@pytest.mark.parametrize(("turns", "running"), [(0, 1), (100, 300)])
def test_lines_that_are_answered_at_once_share_workers(turns: int, running: int) -> None:
    """A worker takes the next line while its data is in the cache; slow lines have one each."""
    num_workers: list[int] = []

    class Watching(Turns):
        async def respond(
            self, url: str, body: dict[str, Any], request_id: str, created: int
        ) -> Reply:
            num_workers.append(len(one._workers))
            return await super().respond(url, body, request_id, created)

    output, engine = MemoryOutput(), Watching()

    async def run(writer: OrderedRows) -> bool:
        nonlocal one
        one = Feed(line_runner(engine, created=0), writer, Tally(), limits=InFlightLimits(300))
        return await one.run(lines([{"turns": turns}] * 600))

    one: Any = None
    with writer_to(output, 600) as writer:
        assert asyncio.run(run(writer))
    assert (len(output.rows), engine.most_running) == (600, running)
    assert (max(num_workers) <= 256) is (turns == 0)


def test_a_line_wider_than_the_window_runs_alone() -> None:
    """Otherwise it never would."""
    bodies = [{"pad": "x" * 5_000}, {}, {"pad": "x" * 5_000}, {}]
    ids, engine, _ = feed(bodies, limits=InFlightLimits(4, 100))
    assert ids == ["1", "2", "3", "4"]
    assert engine.most_running == 1


def test_a_request_that_the_engine_cancels_is_a_failed_row() -> None:
    """It does not stop the run: the others go on."""
    ids, _, is_done = feed([{"cancel": True}, {}], limits=InFlightLimits(4))
    assert (ids, is_done) == (["1", "2"], True)


def test_an_output_that_fails_ends_the_run_and_all_requests() -> None:
    """The error comes out, nothing runs on."""
    with pytest.raises(OutputLost):
        feed([{"turns": number} for number in range(100)], limits=InFlightLimits(8), room=10)


async def test_a_flush_that_fails_at_the_end_of_a_run_is_not_printed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All rows are flushed once more, so there is nothing left to report."""
    feed: Any = Feed(Mock(), Mock(), Tally(), limits=InFlightLimits(1))
    feed._is_cancelling = True

    async def fail() -> NoReturn:
        raise OSError

    task = asyncio.create_task(fail())
    task.add_done_callback(feed._note_failure)
    await asyncio.wait([task])
    del task
    gc.collect()
    assert not caplog.records
