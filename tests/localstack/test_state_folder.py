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
    """Lock the folder for a moment; return the notices."""
    notices: list[str] = []
    with locked_state(folder, None, notices.append):
        pass
    return notices


def test_a_new_folder_gets_a_port_that_stays(tmp_path: Path) -> None:
    """Addresses in the state name it."""
    ports = []
    for _ in range(2):
        with locked_state(tmp_path / "new" / "state", None, lambda _: None) as state:
            ports.append(state.port)
    assert ports[0] == ports[1]


def test_a_writing_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    """It has no final name; the previous one is complete, and no notice is needed."""
    kept = save(tmp_path, 1)
    (tmp_path / "port").write_text("4567")
    (tmp_path / "saving").mkdir()
    (tmp_path / "saving" / "sqs.json").write_text('{"half')
    assert hold(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "port", kept.name]


def test_a_half_written_state_is_reported_and_the_previous_one_is_used(tmp_path: Path) -> None:
    """After a loss of power, a name can be older than the content."""
    whole, half = save(tmp_path, 1), save(tmp_path, 2, '{"half')
    (tmp_path / "port").write_text("4567")
    [notice] = hold(tmp_path)
    assert notice.startswith(f"{half}/sqs.json is half written; resuming from the snapshot of ")
    assert (whole.exists(), half.exists()) == (True, False)


def test_no_whole_state_is_refused_and_nothing_removed(tmp_path: Path) -> None:
    """The objects in the bucket may be a user's only copy."""
    save(tmp_path, 1, "")
    (tmp_path / "port").write_text("4567")
    (tmp_path / "s3").mkdir()
    for _ in range(2):
        with pytest.raises(
            StateRefused, match=r"is half written, and no older snapshot is intact: rem"
        ):
            hold(tmp_path)
    assert (tmp_path / "s3").exists()


def test_a_cloud_that_was_never_ready_starts_from_scratch(tmp_path: Path) -> None:
    """Half a deployment can be neither continued nor overwritten."""
    (tmp_path / "s3").mkdir()
    (tmp_path / "deploying").touch()
    [notice] = hold(tmp_path)
    assert notice == f"the cloud in {tmp_path} ended before it was ready: starting from scratch"
    assert not (tmp_path / "s3").exists()


def test_a_port_file_that_is_torn(tmp_path: Path) -> None:
    """It is written again if nothing depends on it, and otherwise the user must write it."""
    (tmp_path / "port").write_text("")
    hold(tmp_path)
    assert int((tmp_path / "port").read_text())
    save(tmp_path, 1)
    (tmp_path / "port").write_text("")
    with pytest.raises(StateRefused, match="does not contain the port of this cloud"):
        hold(tmp_path)


def test_two_clouds_never_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits with a notice, and is refused if the first continues."""
    notices: list[str] = []
    with locked_state(tmp_path, None, notices.append):
        monkeypatch.setattr(state_module, "_LOCK_SECONDS", 0.0)
        with (
            pytest.raises(StateRefused, match="another cloud uses"),
            locked_state(tmp_path, None, notices.append),
        ):
            pass
    assert notices == [f"another cloud uses {tmp_path}; waiting for it to end"]


def test_what_a_killed_cloud_has_left_is_waited_for(tmp_path: Path) -> None:
    """Its emulator, which holds the lock, is still writing when the next cloud begins."""
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    notices: list[str] = []

    def tell(words: str) -> None:
        notices.append(words)
        threading.Timer(0, os.close, [lock]).start()

    with locked_state(tmp_path, None, tell):
        assert notices == [f"another cloud uses {tmp_path}; waiting for it to end"]
