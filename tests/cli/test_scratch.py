"""A job of SageMaker keeps what it writes where there is room for it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tidemill.cli import scratch


class Usage(NamedTuple):
    """Free bytes, as returned by `shutil`."""

    free: int


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a small disk, a large one, a larger one that is a file, and one that is missing."""
    free = {"small": 10**9, "large": 2 * 10**9}
    for name in free:
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free[Path(path).parent.name]))
    return [str(tmp_path / name) for name in ("small", "large", "file", "missing")]


def test_the_roomiest_place_is_taken(places: list[str]) -> None:
    """Only writable places count, including one that an earlier process used."""
    folder = Path(places[1]) / "tidemill"
    assert scratch.find_scratch(places) == folder
    (folder / "weights").mkdir()
    assert scratch.find_scratch(places) == folder
    assert scratch.find_scratch(places[2:]) is None


def test_the_worker_replaces_the_process_and_gets_its_folder(
    places: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Signals reach the same process; it logs the folder that it writes to."""
    started: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(scratch, "PLACES", places)
    monkeypatch.setattr(os, "environ", {"TIDEMILL_TABLE": "mill", "HOME": "/"})
    monkeypatch.setattr(
        os, "execvpe", lambda file, words, environment: started.append((file, words, environment))
    )
    scratch.main(["worker", "--device", "cuda"])
    [(file, words, environment)] = started
    stdout = json.loads(capsys.readouterr().out)
    assert (stdout["folder"], stdout["free_gigabytes"]) == (f"{places[1]}/tidemill", 2)
    assert (file, words) == ("tidemill", ["tidemill", "worker", "--device", "cuda"])
    assert environment.pop("TIDEMILL_TABLE") == "mill"
    assert os.environ == {"TIDEMILL_TABLE": "mill", "HOME": "/"}
    assert all(value.startswith(f"{places[1]}/tidemill") for value in environment.values())
    assert {"HOME", "TIDEMILL_WEIGHTS_CACHE", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR"} <= set(
        environment
    )


def test_a_job_without_a_writable_place_fails(
    places: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log lists the checked places."""
    monkeypatch.setattr(scratch, "PLACES", places[2:])
    with pytest.raises(SystemExit, match=f"None of these folders is writable: {places[2]}"):
        scratch.main(["worker"])
