"""What one machine has proved of a model is there for the next one, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.handler.worker.rig import Rig, until
from tidemill.batch.object_keys import parity_prefix
from tidemill.handler.worker import parity_results
from tidemill.handler.worker.parity_results import ParityResults

A, B = (f"proof-{letter * 40}" for letter in "ab")
MODEL = "owner/name"


def machine(rig: Rig, folder: Path) -> ParityResults:
    """Return the results of a machine, in a folder that is made with the first of them."""
    return ParityResults(rig.deployment.bucket, MODEL, folder)


def keys(rig: Rig) -> list[str]:
    """Return the keys of the model's results in the bucket."""
    found: list[str] = rig.run(rig.deployment.bucket.list_keys(parity_prefix(MODEL)))
    return found


def test_results_go_from_machine_to_machine(rig: Rig, tmp_path: Path) -> None:
    """Byte for byte, each written once; no other user may change the file."""
    one, two = machine(rig, tmp_path / "one"), machine(rig, tmp_path / "two")
    rig.run(one.download())
    rig.run(one.upload())
    assert keys(rig) == []
    one.folder.mkdir()
    (one.folder / A).write_bytes(b"sum and {}")
    (one.folder / "attention-1").write_bytes(b"is of this machine alone")
    rig.run(one.upload())
    rig.run(two.download())
    assert [path.name for path in two.folder.iterdir()] == [A]
    assert (two.folder / A).read_bytes() == b"sum and {}"
    assert (two.folder / A).stat().st_mode & 0o077 == 0
    (two.folder / A).write_bytes(b"other")
    rig.run(two.download())
    rig.run(two.upload())
    assert (two.folder / A).read_bytes() == b"other"
    assert rig.run(rig.deployment.bucket.get(keys(rig)[0])) == b"sum and {}"


def test_what_is_no_result_is_left_where_it_is(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path, another name, something large, and all but the newest."""
    bucket, prefix = rig.deployment.bucket, parity_prefix(MODEL)
    for name, size in (("../x", 1), (f"{A}x", 1), ("attention-1", 1), (B, 5000), (A, 9)):
        rig.run(bucket.put(prefix + name, b"x" * size))
    rig.run(machine(rig, tmp_path / "one").download())
    assert [path.name for path in (tmp_path / "one").iterdir()] == [A]
    monkeypatch.setattr(parity_results, "_MAX_RESULTS", 0)
    rig.run(machine(rig, tmp_path / "none").download())
    assert not (tmp_path / "none").exists()


async def test_a_worker_shares_what_its_engine_has_proved(rig: Rig, tmp_path: Path) -> None:
    """Once the engine is ready; a bucket that cannot be read is no error."""
    results = machine(rig, tmp_path)
    (tmp_path / A).write_bytes(b"{}")
    async with rig.worker(parity_results=results) as worker:
        await until(lambda: keys(rig))
    assert worker.status == 0
    lost = ParityResults(type(results.bucket)("no-such-bucket-here"), MODEL, tmp_path)
    async with rig.worker(parity_results=lost) as worker:
        await worker.worker._context.read_parity_results()
    assert worker.status == 0
