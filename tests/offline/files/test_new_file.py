"""New files: whole and on disk when they appear."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tidemill.offline.files.new_file import open_new_file


def test_a_file_is_on_disk_when_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows from which it is written may be removed next, and the machine may lose power."""
    path, synced = tmp_path / "rows", list[tuple[int, bool]]()
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append((os.fstat(fd).st_size, path.exists()))
    )
    with open_new_file(str(path)) as file:
        file.write(b"row\n")
    assert synced == [(4, False)]
    assert path.read_bytes() == b"row\n"
    assert [*tmp_path.iterdir()] == [path]
