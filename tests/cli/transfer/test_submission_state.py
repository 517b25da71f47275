"""Tests of the state file of a submission."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tidemill.cli.api.server import Server
from tidemill.cli.transfer.submission_state import SubmissionState, open_state_file

SERVER = Server("https://api.example", "tm_secret")


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an input, in an environment with a separate cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "in.jsonl"
    path.write_text("{}")
    return path


def noted(path: Path, server: Server = SERVER) -> str | None:
    """Return the upload that the notes know of."""
    with open_state_file(server, path) as state_file:
        return state_file.state.upload_id


def note(path: Path, upload_id: str = "upload_1") -> SubmissionState:
    """Write an upload down, as a command does that is killed then."""
    with open_state_file(SERVER, path) as state_file:
        state_file.state.upload_id = upload_id
        state_file.save()
        return state_file.state


def test_notes_are_of_one_file_for_one_server_and_key(path: Path) -> None:
    """Another modification time, server or key has no state."""
    note(path)
    assert noted(path) == "upload_1"
    assert noted(path, Server("https://other.example", "tm_secret")) is None
    assert noted(path, Server("https://api.example", "tm_other")) is None
    os.utime(path, (1, 1))
    assert noted(path) is None


def test_the_key_of_a_request_is_kept_with_them(path: Path) -> None:
    """The same request has the same one, another has another, and so has a new submission."""
    first = note(path).idempotency_key({"a": 1})
    with open_state_file(SERVER, path) as state_file:
        assert state_file.state.idempotency_key({"a": 1}) == first
        assert state_file.state.idempotency_key({"a": 2}) != first
        state_file.remove()
    with open_state_file(SERVER, path) as state_file:
        assert state_file.state.idempotency_key({"a": 1}) != first


def test_no_key_of_the_api_is_written_down(path: Path) -> None:
    """Other users cannot read the file."""
    note(path)
    [kept] = (path.parent / "cache" / "tidemill" / "submissions").iterdir()
    assert "secret" not in kept.name + kept.read_text()
    assert kept.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("content", ["", "[]", "{", '{"begun_at": "x"}', '{"other": 1}', "null"])
def test_notes_that_are_damaged_or_of_another_version_are_none(path: Path, content: str) -> None:
    """The submission starts again."""
    note(path)
    [kept] = (path.parent / "cache" / "tidemill" / "submissions").iterdir()
    kept.write_text(content)
    assert noted(path) is None


def test_old_notes_are_none(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has forgotten the upload by then."""
    note(path)
    monkeypatch.setattr("tidemill.cli.transfer.submission_state.time.time", lambda: 4e9)
    assert noted(path) is None


def test_two_commands_at_one_file_share_no_notes(path: Path) -> None:
    """Each makes its own batch."""
    with open_state_file(SERVER, path) as first:
        first.state.upload_id = "upload_1"
        first.save()
        assert noted(path) is None
    assert noted(path) == "upload_1"


def test_a_folder_that_cannot_be_written_is_a_warning(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command goes on without."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert note(path).upload_id == "upload_1"
    assert "this upload cannot be resumed" in capsys.readouterr().err
    assert noted(path) is None
