"""Two workers of one queue, both in this process: what they share, and what each runs alone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.handler.worker.fakes import FakeEngine
from tests.handler.worker.rig import Rig, until

GOOD: dict[str, Any] = {}


def names(*numbers: int) -> list[str]:
    """Return the custom ids of lines with these numbers."""
    return [f"c{number}" for number in numbers]


@asynccontextmanager
async def two_workers(rig: Rig, **changes: Any) -> AsyncIterator[list[FakeEngine]]:
    """Run two workers while the block runs, and yield their engines."""
    engines = [FakeEngine(), FakeEngine()]
    async with rig.worker(engine=engines[0], **changes), rig.worker(engine=engines[1], **changes):
        yield engines


async def test_two_workers_share_a_batch(rig: Rig) -> None:
    """Each shard is run by one of them, and no line twice."""
    work = rig.batch(*[{"wait": 0.2}] * 24, shard_lines=4, rings=False)
    async with two_workers(rig, max_inflight=2) as engines:
        work.ring()
        await until(lambda: work.is_done)
    requests = [engine.requests for engine in engines]
    assert all(requests)
    assert sorted(requests[0] + requests[1]) == sorted(names(*range(1, 25)))
    assert [work.shard(n).fence for n in range(6)] == [1] * 6
    assert work.ids() == names(*range(1, 25))


async def test_a_message_that_two_have_is_run_by_one(rig: Rig) -> None:
    """The other one's comes back when the lease would have ended, and finds it done."""
    work = rig.batch({"wait": 1}, rings=False)
    async with two_workers(rig, lease_seconds=6) as engines:
        work.ring(0, 0, 0, 0)
        await until(lambda: work.is_done and not rig.run(rig.queue.count()))
    assert engines[0].requests + engines[1].requests == ["c1"]
    assert work.num_left == 0


async def test_rows_do_not_depend_on_who_ran_them(rig: Rig, tmp_path: Path) -> None:
    """A shard that was taken over has the bytes of one that was not."""
    gate = tmp_path / "gate"
    bodies = [GOOD, GOOD, {"gate": str(gate)}]  # the first worker is stopped before the last
    whole, broken = rig.batch(*bodies, rings=False), rig.batch(*bodies, rings=False)
    table = rig.deployment.table
    key = {"pk": f"BATCH#{broken.id}", "sk": "META"}
    created_at = whole.batch.created_at
    rig.run(table.update(key, {"created_at": created_at}, "attribute_exists(pk)", {}))
    broken.ring()
    async with rig.worker(max_inflight=1, flush_seconds=0.05) as first:
        await until(lambda: len(broken.index()) == 2 and first.engine.inside == {"c3"})
    gate.touch()
    whole.ring()
    async with rig.worker(max_inflight=1):
        await until(lambda: whole.is_done and broken.is_done)
    assert broken.shard().fence == 2
    assert json.dumps(whole.sealed()) == json.dumps(broken.sealed())
