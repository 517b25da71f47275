"""Rows that a worker has finished are given while it goes on."""

from __future__ import annotations

from tests.handler.worker.rig import NEVER, Rig, Work, until
from tidemill.handler.queries.part_cache import PartCache
from tidemill.handler.queries.results import Results, read_results
from tidemill.handler.worker.context.config import WorkerConfig


def results_of(work: Work) -> Results:
    """Return all rows that are given now."""
    rig = work.rig
    return read_results(rig.aws, rig.deployment, work.batch, PartCache(), after_line=0, limit=100)


async def test_a_row_is_given_while_its_neighbours_run(rig: Rig) -> None:
    """It waits for nothing but its part: neither for its shard nor for what the table learns."""
    work = rig.batch({}, {"wait": NEVER}, {"status": 400}, {"wait": NEVER})
    async with rig.worker(lease_seconds=600, visibility_seconds=600):
        await until(lambda: len(results_of(work).rows) == 2)
        found = results_of(work)
        assert [line for line, _ in found.rows] == [1, 3]
        assert (found.complete_through, found.has_more) == (1, False)
        assert not work.is_done


def test_a_row_becomes_durable_in_time() -> None:
    """So a client can read a row within fifteen seconds: its part is written well before."""
    assert WorkerConfig(queue="q").flush_seconds_for(10**6) <= 10
