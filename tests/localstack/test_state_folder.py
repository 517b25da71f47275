"""The folder that a cloud keeps its state in, after whatever kill."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from localstack import state_folder as state_module
from localstack.state_folder import StateRefused, locked_state


def save(folder: Path, number: int, text: str = "{}") -> Path:
    """Write one state as the emulator's keeper does."""
    saved = folder / f"saved-{number:09d}"
    saved.mkdir(parents=True)
    (saved / "dynamodb.json").write_text("{}")
    (saved / "sqs.json").write_text(text)
    return saved


def hold(folder: Path) -> list[str]:
    """Hold the folder for a moment; return what was said."""
    said: list[str] = []
    with locked_state(folder, None, said.append):
        pass
    return said


def test_a_new_folder_gets_a_port_that_stays(tmp_path: Path) -> None:
    """Addresses in the state name it."""
    ports = []
    for _ in range(2):
        with locked_state(tmp_path / "new" / "state", None, lambda _: None) as state:
            ports.append(state.port)
    assert ports[0] == ports[1]


def test_a_writing_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    """It has not got its name; the one before is whole, and nothing need be said."""
    kept = save(tmp_path, 1)
    (tmp_path / "port").write_text("4567")
    (tmp_path / "saving").mkdir()
    (tmp_path / "saving" / "sqs.json").write_text('{"half')
    assert hold(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "port", kept.name]


def test_a_half_written_state_is_told_and_the_one_before_is_taken(tmp_path: Path) -> None:
    """As after a loss of power, when a name can be older than what it names."""
    whole, half = save(tmp_path, 1), save(tmp_path, 2, '{"half')
    (tmp_path / "port").write_text("4567")
    [said] = hold(tmp_path)
    assert said.startswith(f"{half}/sqs.json is half written; going on with what was written at ")
    assert (whole.exists(), half.exists()) == (True, False)


def test_no_whole_state_is_refused_and_nothing_removed(tmp_path: Path) -> None:
    """The objects in the bucket may be all that somebody has."""
    save(tmp_path, 1, "")
    (tmp_path / "port").write_text("4567")
    (tmp_path / "s3").mkdir()
    for _ in range(2):
        with pytest.raises(StateRefused, match=r"is half written, and nothing older is whole: rem"):
            hold(tmp_path)
    assert (tmp_path / "s3").exists()


def test_a_cloud_that_was_never_ready_is_started_anew(tmp_path: Path) -> None:
    """Half of a deployment can neither be gone on with nor be put over."""
    (tmp_path / "s3").mkdir()
    (tmp_path / "deploying").touch()
    [said] = hold(tmp_path)
    assert said == f"the cloud in {tmp_path} was ended before it was ready: starting anew"
    assert not (tmp_path / "s3").exists()


def test_a_port_file_that_is_torn(tmp_path: Path) -> None:
    """It is written anew where nothing depends on it, and asked for where something does."""
    (tmp_path / "port").write_text("")
    hold(tmp_path)
    assert int((tmp_path / "port").read_text())
    save(tmp_path, 1)
    (tmp_path / "port").write_text("")
    with pytest.raises(StateRefused, match="does not say at which port this cloud stood"):
        hold(tmp_path)


def test_two_clouds_never_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits, says so, and is refused if the first goes on."""
    said: list[str] = []
    with locked_state(tmp_path, None, said.append):
        monkeypatch.setattr(state_module, "_LOCK_SECONDS", 0.0)
        with (
            pytest.raises(StateRefused, match="another cloud runs with"),
            locked_state(tmp_path, None, said.append),
        ):
            pass
    assert said == [f"another cloud has {tmp_path}; waiting for its end"]


def test_what_a_killed_cloud_has_left_is_waited_for(tmp_path: Path) -> None:
    """Its emulator, which holds the lock, is still writing when the next cloud begins."""
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    said: list[str] = []

    def tell(words: str) -> None:
        said.append(words)
        threading.Timer(0, os.close, [lock]).start()

    with locked_state(tmp_path, None, tell):
        assert said == [f"another cloud has {tmp_path}; waiting for its end"]
