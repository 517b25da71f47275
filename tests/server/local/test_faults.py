"""Every call behind a server's batch fails in turn: no batch is completed without all its rows."""

from __future__ import annotations

import asyncio
import gc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.faults import EXCEPTIONS, Call, Fault, faults_of, profiled
from tests.server.local import rig
from tests.server.local.rig import Local, lines_of, serving
from tidemill.server.local import batch_run

FOLDERS = (
    *("server/local/batch_run", "server/local/runner", "server/local/rows"),
    *("server/local/publish", "server/local/validation", "batch/file/run_line"),
)
BODIES = [{}, {"status": 400}, {}, {"wait": True}, {}, {}]
IDS = [f"c{number}" for number in range(len(BODIES))]


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a small batch take several reads and flushes."""
    monkeypatch.setattr(batch_run, "_READ_LINES", 2)
    monkeypatch.setattr(batch_run, "FLUSH_SECONDS", 0.005)


async def ended(local: Local, batch_id: str) -> dict[str, Any]:
    """Return a batch once it has ended; a failed poll is retried, as clients do."""
    async with asyncio.timeout(rig.SECONDS):
        while True:
            polled = await local.client.get(f"/v1/batches/{batch_id}")
            if polled.status_code == 200 and polled.json()["status"] in rig.ENDED:
                return dict(polled.json())
            assert polled.status_code in {200, 500}, polled.text
            await asyncio.sleep(0.005)


async def run_batch(root: Path, fault: Fault | None) -> tuple[str, list[str], object]:
    """Return the status of a batch, the sorted IDs of its rows, and the calls behind it."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor())  # a profile covers threads that start under it
    async with serving(root) as local:
        with profiled(FOLDERS, fault) as counts:
            try:
                batch = await local.submit(lines_of(BODIES))
            except AssertionError:  # the response is a 500, and there is no batch
                return "refused", [], counts
            loop.call_later(0.02, local.engine.go.set)
            batch = await ended(local, batch["id"])
        names = ("output_file_id", "error_file_id")
        rows = [row for name in names for row in await local.rows(batch[name])]
    return batch["status"], sorted(row["custom_id"] for row in rows), counts


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
@pytest.mark.parametrize("one_in", [61, pytest.param(1, marks=pytest.mark.long)])
async def test_a_batch_is_completed_with_all_rows_or_fails(tmp_path: Path, one_in: int) -> None:
    """A failed step is retried, or ends the batch with its finished rows and an error."""
    await run_batch(tmp_path / "first", None)
    status, ids, counts = await run_batch(tmp_path / "whole", None)
    assert (status, ids) == ("completed", IDS)
    exits = EXCEPTIONS[-1]
    for place, fault in enumerate(faults_of(counts, one_in=one_in)):  # type: ignore[arg-type]
        if fault.exception is exits:  # it ends the server, and the next one continues
            continue
        if fault.call.function.endswith("> __exit__"):  # a file whose end fails stays open
            continue
        status, ids, _ = await run_batch(tmp_path / str(place), fault)
        if status == "completed":
            assert ids == IDS, fault
        assert status in {"completed", "failed", "refused"}, fault
        assert len(ids) == len({*ids}), fault
    gc.collect()


@pytest.mark.parametrize(
    ("call", "number"),
    [
        # The write was committed: the next one skips its rows.
        (Call("server/local/rows.py", "Rows.append", "end"), 0),
        # The batch's task ends before it can handle anything, and is started again.
        (Call("server/local/runner.py", "Runner._run_to_end", "start"), 0),
        # Two tasks of the run have started: they must not write during the next run.
        (Call("server/local/runner.py", "Runner._run_batch.<locals>.<genexpr>", "start"), 2),
    ],
)
async def test_a_batch_survives_a_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: Call, number: int
) -> None:
    """At most one retry is logged, and the batch has each row once."""
    status, ids, _ = await run_batch(tmp_path, Fault(call, number, EXCEPTIONS[2]))
    assert (status, ids) == ("completed", IDS)
    assert len(caplog.records) <= 1
