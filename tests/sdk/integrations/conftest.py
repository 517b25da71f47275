"""Addresses of sockets in a folder of each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tidemill.sdk.integrations import sockets
from tidemill.sdk.integrations.sockets import socket_address


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Return a folder whose path leaves room for a socket's, as those of tests do not."""
    with TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def address(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the address of a socket."""
    monkeypatch.setattr(sockets.tempfile, "tempdir", str(short_path))
    return socket_address("a key")
