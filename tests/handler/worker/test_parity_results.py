"""Results of parity checks are shared between machines, and nothing else is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.handler.worker.rig import Rig, until
from tidemill.batch.object_keys import parity_prefix
from tidemill.engine.storage.disk_cache import CacheEntry
from tidemill.handler.aws.bucket import Bucket
from tidemill.handler.worker import parity_results
from tidemill.handler.worker.parity_results import ParityResults
from tidemill.offline.engine.parity_cache import ParityCache

A, B, C = (CacheEntry("proof", letter * 40) for letter in "abc")
MODEL = "owner/name"
PREFIX = parity_prefix(MODEL)


@pytest.fixture(name="machine")
def fixture_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of entries of a machine that has none, and which has just started."""
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "one"))
    return tmp_path / "one" / "remembered"


def results(rig: Rig, since: float = 0) -> ParityResults:
    """Return the results of a worker that has started at a time."""
    return ParityResults(rig.deployment.bucket, MODEL, ParityCache(since))


def keys(rig: Rig) -> list[str]:
    """Return the digests that the bucket has."""
    found = rig.run(rig.deployment.bucket.list_keys(PREFIX))
    return [key.removeprefix(PREFIX) for key in found]


def test_results_go_from_machine_to_machine(
    rig: Rig, machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only results that an engine has produced or used are shared; each is written once."""
    worker = results(rig)
    rig.run(worker.download())
    rig.run(worker.upload())
    assert keys(rig) == []
    A.save(b"is proved")
    C.save(b"is of long ago")
    os.utime(machine / f"proof-{C.digest}", (1, 1))
    CacheEntry("attention", "d" * 40).save(b"is of this machine alone")
    rig.run(results(rig, since=2).upload())
    assert keys(rig) == [A.digest]
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "two"))
    worker = results(rig)
    rig.run(worker.download())
    assert A.load() == b"is proved"
    rig.run(rig.deployment.bucket.delete(PREFIX + A.digest))
    rig.run(worker.upload())
    assert keys(rig) == []


@pytest.mark.usefixtures("machine")
def test_other_files_are_left_where_they_are(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths, other names, large and torn files, and all but the newest are not results."""
    bucket = rig.deployment.bucket
    A.save(b"{}")
    rig.run(results(rig).upload())
    for name, size in (("../x", 1), (f"{A.digest}x", 1), (B.digest, 5000), (C.digest, 90)):
        rig.run(bucket.put(PREFIX + name, b"x" * size))
    monkeypatch.setenv("TIDEMILL_CACHE", os.environ["TIDEMILL_CACHE"] + "-two")
    monkeypatch.setattr(parity_results, "_MAX_RESULTS", 0)
    rig.run(results(rig).download())
    assert A.load() is None
    monkeypatch.setattr(parity_results, "_MAX_RESULTS", 5)
    worker = results(rig)
    rig.run(worker.download())
    assert [A.load(), B.load(), C.load()] == [b"{}", None, None]
    C.save(b"is whole")  # and takes the place of the torn one
    rig.run(worker.upload())
    assert rig.run(bucket.get(PREFIX + C.digest)) == C.load_sealed()


@pytest.mark.usefixtures("machine")
async def test_a_worker_shares_what_its_engine_has_proved(rig: Rig) -> None:
    """It does so once the engine is ready; an unreadable bucket is not an error."""
    A.save(b"{}")
    async with rig.worker(parity_results=results(rig)) as worker:
        await until(lambda: keys(rig))
    assert worker.status == 0
    lost = ParityResults(Bucket("no-such-bucket-here"), MODEL, ParityCache(0))
    async with rig.worker(parity_results=lost) as worker:
        await worker.worker._context.read_parity_results()
    assert worker.status == 0


def test_a_pipe_in_the_cache_blocks_nothing(rig: Rig, machine: Path) -> None:
    """A folder blocks nothing either."""
    machine.mkdir(parents=True)
    os.mkfifo(machine / f"proof-{A.digest}")
    (machine / f"proof-{B.digest}").mkdir()
    rig.run(results(rig).upload())
    assert keys(rig) == []
